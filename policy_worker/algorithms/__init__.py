"""The formulas: pure functions over tensors, one formula each, with its source.

    scores ── advantages ─┐
    log-probs ── policy_loss ── aggregation ── objective (one scalar)
                          kl ── metrics

Computed in float32; float64 passes through. Nothing here knows of ranks, models or configuration.
"""
