"""A policy replica: one or more ranks that train the model on the batches the controller assembles.

__main__ ─ worker ─┬─ session      what is said to the controller
                   ├─ loop         train, commit, publish, save, export
                   │    ├─ grpo    one step of reinforcement learning, on step_batch's samples
                   │    └─ sft     one step of supervised training
                   └─ trainer      model, optimizer, schedule: log-probs ─▶ loss ─▶ gradient ─▶ update
                        ├─ batching, micro_batch    who computes what, and its tensors
                        ├─ model, logprobs, parallel
                        └─ algorithms, schedule     the formulas
"""
