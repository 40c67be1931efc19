"""The sampling seed of a sample: a function of what is sampled, never of who samples it or of the attempt."""

from __future__ import annotations

import hashlib


def sample_seed(job_seed: int, kind: str, epoch: int, position: int, index: int) -> int:
    """Seed in [0, 2**31) for sample `index` of the prompt at `position` of `epoch`.

    31 bits, because every engine (numpy, torch, vLLM) accepts them. A re-queued group, or another replica that
    takes over its lease, samples with the same seeds.
    """
    text = f"{job_seed}/{kind}/{epoch}/{position}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
