"""Another system's own scheduler as a third side: the same requests and step results, its decisions beside ours.

`decisions` says what is compared, and finds the first difference. `check` notes the decisions of our policy core,
starts vLLM's scheduler, unmodified, in the interpreter that has it, and drives both sides step by step; `vllm_driver`
is what runs there.
"""
