"""Cost models: the predicted seconds of a step.

`roofline` needs datasheets only, `operators` a CSV of timed operators, `published` a package of them, `fitted` measured
steps, `table` measured attention. All implement the protocol in `harness.replay.cost_model`.
"""
