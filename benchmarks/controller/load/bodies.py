"""Request bodies: samples are encoded once for each weight version, what differs is patched around them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from schema.wire import payload_file
from schema.wire.frame import pack_bundle
from schema.wire.messages import PushItem, PushList
from schema.wire.sample import Sample, SampleHeader, encode_sample

PROMPT_SHARE = 8
"""One token in so many belongs to the prompt."""


def make_sample(index: int, version: int, tokens: int) -> Sample:
    """A completion of `tokens` tokens with log-probs, such as an engine makes."""
    prompt = max(1, tokens // PROMPT_SHARE)
    chance = np.random.default_rng(index)
    mask = np.zeros(tokens, np.uint8)
    mask[prompt:] = 1
    header = SampleHeader(
        index=index,
        prompt_tokens=prompt,
        response_tokens=tokens - prompt,
        total_tokens=tokens,
        oldest_version=version,
        newest_version=version,
        finish_reason="stop",
        rewards={"math": float(index % 2), "format": 0.25},
        score=float(index % 2) + 0.25,
    )
    return Sample(
        header=header,
        token_ids=chance.integers(0, 150_000, tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, -chance.exponential(0.5, tokens), 0.0).astype(np.float32),
        version_starts=np.array([0, prompt], np.int32),
        version_values=np.array([-1, version], np.int32),
    )


class Bundles:
    """Bundles of one whole group, and of the same bytes for each group of a version."""

    KEPT = 3

    def __init__(self, n_samples: int, tokens: int) -> None:
        self.n_samples, self.tokens = n_samples, tokens
        self._tails: dict[int, tuple[bytes, list[int]]] = {}
        self.group_bytes = len(self._tail(0)[0])

    def _tail(self, version: int) -> tuple[bytes, list[int]]:
        if version not in self._tails:
            frames = [encode_sample(make_sample(i, version, self.tokens)) for i in range(self.n_samples)]
            while len(self._tails) >= self.KEPT:
                del self._tails[min(self._tails)]
            self._tails[version] = b"".join(frames), [len(frame) for frame in frames]
        return self._tails[version]

    def bundle(self, replica_id: str, group_id: str, lease_id: str, version: int) -> tuple[bytes, bytes]:
        """Header and payload of the bundle of a group (see `schema.wire.frame`)."""
        tail, sizes = self._tail(version)
        item = f'{{\\"group_id\\":\\"{group_id}\\",\\"lease_id\\":\\"{lease_id}\\",\\"index\\":'
        pushes = ",".join(f"{item}{index}}}" for index in range(self.n_samples))
        parts = [f'{{"__metadata__":{{"pushes":"{{\\"replica_id\\":\\"{replica_id}\\",\\"pushes\\":[{pushes}]}}"}}']
        start = 0
        for index, size in enumerate(sizes):
            parts.append(f'"{index}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{start + size}]}}')
            start += size
        text = ",".join(parts).encode() + b"}"
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, tail

    def stubs(self, root: Path, replica_id: str, group_id: str, lease_id: str, version: int) -> tuple[bytes, bytes]:
        """Write the frames of a group into the shared directory; the bundle of their stubs, and nothing after it."""
        tail, sizes = self._tail(version)
        frames, start = [], 0
        for index, size in enumerate(sizes):
            name = payload_file.FileName(group_id, lease_id, index)
            frames.append(payload_file.write(root, name, tail[start : start + size]))
            start += size
        pushes = [PushItem(group_id=group_id, lease_id=lease_id, index=index) for index in range(len(sizes))]
        listed = PushList(replica_id=replica_id, pushes=pushes).model_dump_json()
        return pack_bundle(frames, {"pushes": listed}), b""


def json_group(n_samples: int, tokens: int, version: int) -> bytes:
    """The samples of a group as JSON lists, as a first version anywhere would send them."""
    rows = []
    for index in range(n_samples):
        sample = make_sample(index, version, tokens)
        rows.append(
            {
                **sample.header.model_dump(),
                "token_ids": sample.token_ids.tolist(),
                "loss_mask": sample.loss_mask.tolist(),
                "logprobs": sample.logprobs.tolist(),
                "version_starts": sample.version_starts.tolist(),
                "version_values": sample.version_values.tolist(),
            }
        )
    return json.dumps(rows).encode()
