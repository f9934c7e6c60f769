"""Cost models: the predicted seconds of a step.

`roofline` needs datasheets only, `operators` a CSV of timed operators, `published` a package of them, `fitted` measured
steps, `table` measured attention (that of `bench kernels` by `kernel_table`). All implement the protocol in
`harness.replay.cost_model`.
"""
