"""Where our defaults differ from those of cosmos-rl's schema, whose names and defaults are otherwise ours."""

from __future__ import annotations

from typing import Any, NamedTuple


class Deviation(NamedTuple):
    """One default that differs: theirs, ours, and why."""

    theirs: Any
    ours: Any
    reason: str


DEVIATIONS: dict[str, Deviation] = {
    "train.train_batch_per_replica": Deviation(
        theirs=8,
        ours=16,
        reason="A step takes whole groups: with the default of 16 samples per group a batch of 8 can never "
        "be one.",
    ),
    "train.transfer_dtype": Deviation(
        theirs="None",
        ours=None,
        reason="Their default is printed as the text None; ours is unset and means param_dtype, so that the "
        "rollout engine gets exactly the weights that the trainer computes with.",
    ),
}
