"""Every optimizer on one and two real ranks: the same weights, and the same bits when it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from policy_worker.parallel.rank_group import RankGroup
from tests.policy_worker.optimizer_program import CASES, in_one_go, resumed
from tests.policy_worker.ranks import start_ranks, wait_ranks


@pytest.mark.slow
def test_optimizers_on_two_ranks_equal_one_and_resume_bit_for_bit(tmp_path: Path, group: RankGroup):
    arguments = ["tests.policy_worker.optimizer_program", str(tmp_path), *CASES]
    for code, output in wait_ranks(start_ranks(2, arguments)):
        assert code == 0, output
    for name in CASES:
        together = load_file(tmp_path / f"{name}.safetensors")
        alone = in_one_go(name, group)
        again = resumed(name, group, tmp_path / name / "step-00000002")  # on half as many ranks
        assert together.keys() == alone.keys() == again.keys()
        for key, tensor in alone.items():
            for found in (together[key], again[key]):
                torch.testing.assert_close(found, tensor, rtol=1e-6, atol=1e-7, msg=f"{name}: {key}")
