"""A policy replica of cosmos-launch: one or more ranks that train the model on the batches of the controller.

__main__ ─ worker ─┬─ session        calls to the controller and heartbeats; rejoin_log: what it may have lost
                   ├─ training/loop  wait, train, commit, publish, save, export
                   │    ├─ grpo      one step: step_plan, passes, credit, critic, policy_update
                   │    ├─ sft       one step of supervised training
                   │    └─ batches/, metrics         who computes what; what a step reports
                   ├─ replicas/      other policy replicas that train with this one
                   ├─ trained/       what learns: micro-batches, forward, backward, optimizer
                   │    ├─ model/, parallel/         log-probs, sharding
                   │    └─ algorithms/               the formulas
                   ├─ weights/       publishing versions
                   └─ checkpoints/   saving, resuming, uploading

replay ─ training/replay             the same on batches that batches/recording has kept, without a controller
"""
