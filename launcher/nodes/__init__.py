"""A job on several machines: the same command on each, and one of them, the head, is its launcher.

    node 0, the head                                     node 1 … n-1
    cosmos-launch --config run.toml --head ADDRESS       the same command
      │ listens at ADDRESS, announces the run              │ finds the announcement in train.output_dir
      │ ◀────── nonces, proofs of the announced token ───▶ │ the head proves itself first (`link`)
      │ ◀───────────────── hello ───────────────────────── │ machine, code, config, model, clock  (`agreement`)
      │ ───────────────── challenge ─────────────────────▶ │ writes to each directory that must be shared
      │ ◀────────────────── proof ──────────────────────── │
      │ ─────────────── welcome or refusal ──────────────▶ │
      │ places processes over all machines                 │
      │ ◀── started, ended ────────── start, signal ─────▶ │ runs each below a keeper, as the head does its own
      │ ────────────────── finish ───────────────────────▶ │ leaves with the job's exit code

The head decides and restarts; a node runs the processes that the head names, by command lines of its own (`orders`).
The head's port is open to strangers, who get nothing (`listener`). Both sides send beats: silence for
`controller.heartbeat_timeout` ends the connection. Then the head counts the node's processes as lost and waits
`controller.start_timeout` for it, and the node ends them and joins again for as long. One port of the head is used
by this (`link`), one by the controller; ranks of the policy choose theirs (`policy_worker.replicas.rendezvous`).
"""
