"""Facts of each advantage estimator and policy loss: the tables that keys and rules read.

    ESTIMATORS["gae"].options, LOSSES["gspo"].clips

A new one is a row here with its name in the `Literal`, and the function of that name in `policy_worker.algorithms`.
A user's own (`file.py:function`) is in neither table: it may read any option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# fmt: off
EstimatorName = Literal[
    "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "remax", "gpg", "pass_at_k", "gae"
]
# fmt: on
LossName = Literal["grpo", "dapo", "gspo", "cispo", "reinforce", "geo_mean", "sapo"]


@dataclass(frozen=True)
class Estimator:
    """One advantage estimator.

    alone: what the only sample of a prompt gets, of an estimator that compares the samples of a prompt; else empty.
    options: the keys of `[train.train_policy]` that it reads. greedy: whether each group has one more sample, drawn
    greedily and not trained, whose score it reads.
    """

    alone: str = ""
    options: tuple[str, ...] = ()
    greedy: bool = False


@dataclass(frozen=True)
class Loss:
    """One policy loss.

    clips: whose ratio it bounds; that of tokens has a dual clip. loss_type: the aggregation that is part of its
    definition, else empty.
    """

    clips: Literal["tokens", "sequences", "weights", "nothing"]
    loss_type: str = ""


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(alone="its raw score", options=("unbiased_advantage",)),
    "rloo": Estimator(alone="its raw score"),
    "reinforce_plus_plus": Estimator(options=("gamma",)),
    "reinforce_plus_plus_baseline": Estimator(alone="its raw score"),
    "opo": Estimator(alone="always zero"),
    "remax": Estimator(greedy=True),
    "gpg": Estimator(alone="always zero"),
    "pass_at_k": Estimator(alone="a second best that does not exist", options=("unbiased_advantage",)),
    "gae": Estimator(options=("gamma", "gae_lambda")),
}
LOSSES: dict[str, Loss] = {
    "grpo": Loss(clips="tokens"),
    "dapo": Loss(clips="tokens"),
    "gspo": Loss(clips="sequences", loss_type="seq-mean-token-mean"),
    "cispo": Loss(clips="weights"),
    "reinforce": Loss(clips="nothing"),
    "geo_mean": Loss(clips="sequences", loss_type="seq-mean-token-mean"),
    "sapo": Loss(clips="nothing"),
}
