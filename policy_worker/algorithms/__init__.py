"""The formulas: pure functions over numbers and tensors, each with its source.

    rewards ── advantages ─┐
    log-probs ── a policy loss ── token weights ── policy_objective (one scalar)

Computed in float32; float64 passes through. Nothing here knows of ranks, models or configuration. A new formula is a
function in `estimators` or `losses` under a decorator with its name in the configuration.
"""
