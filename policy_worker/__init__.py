"""A policy replica of cosmos-launch: one or more ranks that train the model on the batches of the controller.

__main__ ─ worker ─┬─ session        calls to the controller and heartbeats; replay_log, what it may ask for again
                   ├─ training/loop  wait, train, commit, publish, save, export
                   │    ├─ grpo      one step: step_plan, passes, credit, critic, policy_update
                   │    ├─ sft       one step of supervised training
                   │    └─ batches/, metrics         who computes what; what a step reports
                   ├─ replicas/      other policy replicas that train with this one
                   ├─ trained/       micro_batches, forward, backward, step
                   │    ├─ model/, parallel/         log-probs, optimizer, sharding
                   │    └─ algorithms/               the formulas
                   ├─ weights/       publishing versions
                   └─ checkpoints/   saving, resuming, uploading

replay ─ training/replay             the same on batches that batches/recording has kept, without a controller
"""
