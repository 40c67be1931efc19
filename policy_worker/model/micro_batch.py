"""Tensors of a micro-batch: what the model reads, and which of its positions predict a token that counts.

    packed   all sequences in one row, positions start again at each            [1, T]
    shared   the same, and equal prompts are there once (see `attention`)       [1, T]
    padded   one row per sequence, zeros behind its end                         [R, longest]

In all, position i reads token i and predicts token i + 1, so a sequence of n tokens has n − 1 inputs. Everything
after the model is flat: `index` picks the K predicting positions out of all rows, and the loss sees K tokens and
the sample of each, no padding and no prompts; where a prompt is shared, its last position predicts a token of each.
No layout has an attention mask over its rows: sequences in one row are kept apart by blocks, or by their positions
where the model's attention takes no blocks, and nothing attends to the padding behind a padded row.

Ranks that share rows along the sequence (context parallelism) have all of this micro-batch; its rows are cut into
equal pieces, and each rank computes the tokens that its own piece predicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from policy_worker.errors import BadBatchError, SettingsError
from policy_worker.model.arrival import on_device
from policy_worker.model.attention import LEAST_FILL, Block, starts_of
from policy_worker.model.flash import takes_heads, takes_type
from policy_worker.model.logits.drawn import Drawn, DrawnContext, KeptSets, Reshaping, drawn_of
from schema.wire.sample import Sample

Ints = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints64 = npt.NDArray[np.int64]
Experts = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
LEAST_SPARED, LEAST_SPARED_MASKED = 0.05, 0.3
"""Part of its tokens by which shared prompts must make a micro-batch smaller, to be worth it: on a CPU, where it was
measured (`benchmarks/trainer/layouts.py`), and where a GPU has a kernel for sequences of any length; and on a GPU
whose attention needs masks for them, where it is a guess."""


def least_spared(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> float:
    """Which of the two holds for a model that computes in this type with heads of these widths."""
    if device.type == "cpu":
        return LEAST_SPARED
    has_kernel = takes_type(dtype, torch.cuda.get_device_capability(device)) and takes_heads(*widths)
    return LEAST_SPARED if has_kernel else LEAST_SPARED_MASKED


OWN = -1
"""The id that stands for the router's own choice of an expert."""


class Mixtures(NamedTuple):
    """layers: those of a model that have experts. experts: of each."""

    layers: int
    experts: int


class RoutingRecord(NamedTuple):
    """Choices of experts for the positions of rows: ids int16 [R, L, M, k] of k experts in each of M mixtures,
    and their weights float32 [R, L, M, k], if they are known."""

    ids: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class Segment:
    """One contiguous sequence: tokens [n], which of them to learn [n], behaviour log-probs [n] (None in SFT).

    kept: the sets that the learned ones were drawn from; None where no filter was on. experts: those that the engine
    chose for all but the last one, in each of M mixtures: ids [n − 1, M, k] and their weights; None: it did not say.
    """

    token_ids: Ints
    loss_mask: Bits
    logprobs: Floats | None
    kept: KeptSets | None = None
    experts: tuple[Experts, Floats | None] | None = None


@dataclass(frozen=True)
class TrainSample:
    """One sample as the trainer uses it.

    versions: which weight version made each of its learned tokens, [n]; empty in SFT, where none did.
    earned: what of its score each of them earned beyond the rest of it, which is the last one's, [n]; sums to 0.
    None: the last one earned all of it.
    held: ids that could not be drawn as one of the first `min_tokens`; None: there was no such number."""

    segments: list[Segment]
    versions: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    earned: Floats | None = None
    held: Ints | None = None

    @property
    def tokens_by_version(self) -> Mapping[int, int]:
        """How many of its learned tokens each weight version made."""
        versions, tokens = np.unique(self.versions, return_counts=True)
        return dict(zip(versions.tolist(), tokens.tolist(), strict=True))

    @property
    def learned_logprobs(self) -> Tensor:
        """Behaviour log-probs of the learned tokens, float32 [n]."""
        logprobs = [
            segment.logprobs[1:][segment.loss_mask[1:] == 1]
            for segment in self.segments
            if segment.logprobs is not None
        ]
        return torch.from_numpy(np.concatenate(logprobs))

    @property
    def learned_ids(self) -> Ints:
        """The learned tokens, int32 [n]."""
        return np.concatenate([segment.token_ids[1:][segment.loss_mask[1:] == 1] for segment in self.segments])

    @property
    def learned_tokens(self) -> int:
        """Tokens that count in the loss: all under the mask but a first one, which nothing predicts."""
        return sum(int(segment.loss_mask[1:].sum()) for segment in self.segments)

    def has_routing(self, *, weights: bool) -> bool:
        """Whether the experts that the engine chose are known, and their weights, if these are asked for."""
        experts = [segment.experts for segment in self.segments]
        return all(chosen is not None and (chosen[1] is not None or not weights) for chosen in experts)

    @staticmethod
    def of_wire(sample: Sample) -> TrainSample:
        """Cut a sample into its segments.

        Raises `BadBatchError`: a segment begins with a generated token, whose log-prob nothing can be compared with.
        """
        starts = [int(start) for start in sample.segment_starts]
        segments = [
            Segment(
                sample.token_ids[a:b],
                sample.loss_mask[a:b],
                sample.logprobs[a:b],
                _kept(sample, int(sample.loss_mask[:a].sum()), int(sample.loss_mask[:b].sum())),
                _experts(sample, a - number, b - number - 1),
            )
            for number, (a, b) in enumerate(zip(starts, [*starts[1:], len(sample.token_ids)], strict=True))
        ]
        if any(segment.loss_mask[0] for segment in segments):
            raise BadBatchError("a segment begins with a generated token: it needs at least one token of prompt")
        learned = sample.loss_mask == 1
        held = sample.held_ids if len(sample.held_ids) else None
        return TrainSample(segments, sample.token_versions()[learned], _earned(sample, learned), held)


def _kept(sample: Sample, first: int, last: int) -> KeptSets | None:
    """Return the kept sets of the generated tokens `first` to `last`."""
    if not len(sample.kept_counts):
        return None
    begin, end = (int(sample.kept_counts[:n].sum(dtype=np.int64)) for n in (first, last))
    return KeptSets(sample.kept_counts[first:last], sample.kept_ids[begin:end])


def _experts(sample: Sample, first: int, last: int) -> tuple[Experts, Floats | None] | None:
    """Return the experts of tokens `first` to `last`, of those that are not the last ones of their segments."""
    if not len(sample.expert_shape):
        return None
    shape = (-1, *sample.expert_shape.tolist())
    weights = sample.expert_weights.reshape(shape)[first:last] if len(sample.expert_weights) else None
    return sample.expert_ids.reshape(shape)[first:last], weights


def _earned(sample: Sample, learned: npt.NDArray[np.bool_]) -> Floats | None:
    if not len(sample.part_positions):
        return None
    earned = np.zeros(len(learned), np.float32)
    earned[sample.part_positions] = sample.part_values
    of_learned = earned[learned]
    of_learned[-1] -= of_learned.sum()
    return of_learned


@dataclass(frozen=True)
class MicroBatch:
    """See the module's docstring. R rows of L positions; K tokens that count, of S samples.

    input_ids, position_ids: int64 [R, L]. index: int64 [K] into the flattened [R · L]; where rows are cut, into those
    of the piece that predicts the token. labels: int64 [K]. old_logprobs: float32 [K]. sample: int64 [K] in [0, S).
    rows: the table's row of each sample. columns: [K, …] each, what passes before this one found for its tokens.
    blocks: of the attention, where all sequences are in one row; starts: of their sequences, int32 [2, S' + 1] (see
    `attention.starts_of`). drawn: what the tokens of this rank's piece were
    drawn from, where that is not the model's softmax. pieces: int64 [k] each, which of the K tokens each piece
    predicts, rising; empty where rows are whole. piece: this rank's. routing: what the engine's routers chose for the
    positions, where it is replayed."""

    input_ids: Tensor
    position_ids: Tensor
    index: Tensor
    labels: Tensor
    old_logprobs: Tensor
    sample: Tensor
    rows: list[int]
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    blocks: Sequence[Block] = ()
    starts: Tensor | None = None
    drawn: Drawn | None = None
    pieces: Sequence[Tensor] = ()
    piece: int = 0
    routing: RoutingRecord | None = None

    @property
    def n_samples(self) -> int:
        return len(self.rows)

    def of_piece(self, values: Tensor) -> Tensor:
        """Pick the values of this rank's piece, [k, …], from those of the K tokens, [K, …]."""
        return values.index_select(0, self.pieces[self.piece]) if self.pieces else values


@dataclass(frozen=True)
class BatchLayout:
    """packed: the layout. vocabulary: token ids are below it. device: where the tensors go.

    least_spared: equal prompts are there once where that spares at least this part of the tokens, in packed rows as
    in others; None: never, for models whose attention takes no blocks. reshaping: what changes the distribution that
    tokens are drawn from.
    pieces: into how many the rows are cut. piece: this rank's. parts: into how many a piece is cut within the model.
    The length of rows is a multiple of both together. mixtures: of the model that chooses experts as the engine did;
    None: it chooses for itself."""

    packed: bool
    vocabulary: int
    device: torch.device | str = "cpu"
    least_spared: float | None = None
    reshaping: Reshaping = field(default_factory=Reshaping)
    pieces: int = 1
    piece: int = 0
    parts: int = 1
    mixtures: Mixtures | None = None


Columns = Mapping[str, Mapping[int, Tensor]]
"""By name and row: a number for each learned token of a sample, [n_i]."""


def collate(
    samples: Sequence[TrainSample], rows: Sequence[int], layout: BatchLayout, columns: Columns = MappingProxyType({})
) -> MicroBatch:
    """Lay samples out. Without any, it is an empty micro-batch: one position that predicts nothing.

    columns: of these rows and maybe others, on any device. What is in host memory comes to the device in one copy.

    Raises `SettingsError`: a sample of several segments in the padded layout, whose size nobody could know
    beforehand; a token id that the model has no embedding for; see `drawn_of`; `BadBatchError`: see `drawn_of`, and
    `_routing_of`."""
    parts = layout.pieces * layout.parts
    owners = [number for number, sample in enumerate(samples) for _ in sample.segments]
    segments = [segment for sample in samples for segment in sample.segments]
    if not layout.packed and len(segments) > len(samples):
        raise SettingsError("train.sequence_packing = false: samples of several segments need it to be true")
    lengths = np.array([len(segment.token_ids) - 1 for segment in segments], np.int64)
    width = _multiple(int(lengths.max(initial=1)), parts)
    prompts = _worth_sharing(segments, lengths, layout)
    one_row = layout.packed or any(shared for shared, _ in prompts)
    if one_row:
        places, blocks = _in_blocks(prompts, lengths)
    else:
        places, blocks = [number * width + np.arange(length) for number, length in enumerate(lengths)], []
    ends = [int(place[-1]) + 1 for place in places if len(place)]
    row = (1, _multiple(max(ends, default=1), parts))
    shape = row if one_row else (max(len(segments), 1), width)
    input_ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    if not one_row:
        positions[:] = np.arange(width)
    index, labels, old, owner, contexts = [], [], [], [], []
    for segment, place, number in zip(segments, places, owners, strict=True):
        input_ids.reshape(-1)[place] = segment.token_ids[:-1]
        positions.reshape(-1)[place] = np.arange(len(place))
        picked = np.flatnonzero(segment.loss_mask[1:])
        index.append(place[picked])
        labels.append(segment.token_ids[1:][picked])
        old.append(np.zeros(len(picked)) if segment.logprobs is None else segment.logprobs[1:][picked])
        owner.append(np.full(len(picked), number))
        contexts.append(DrawnContext(rows[number], segment.token_ids, picked + 1, segment.kept, samples[number].held))
    _check_ids(segments, layout.vocabulary)
    at, of_pieces = _in_pieces(_joined(index, np.int64), shape[1], layout.pieces)
    drawn = drawn_of(contexts, layout.reshaping, layout.vocabulary)
    if drawn is not None and of_pieces:
        drawn = drawn.of_tokens(of_pieces[layout.piece])
    batch = MicroBatch(
        input_ids=_tensor(input_ids),
        position_ids=_tensor(positions),
        index=_tensor(at),
        labels=_tensor(_joined(labels, np.int64)),
        old_logprobs=_tensor(_joined(old, np.float32)),
        sample=_tensor(_joined(owner, np.int64)),
        rows=list(rows),
        columns={
            name: torch.cat([values[row] for row in rows]) if rows else torch.empty(0)
            for name, values in columns.items()
        },
        blocks=blocks,
        starts=_tensor(starts_of(blocks)) if blocks else None,
        drawn=drawn,
        pieces=[_tensor(tokens) for tokens in of_pieces],
        piece=layout.piece,
        routing=_routing_of(segments, places, shape, layout),
    )
    return on_device(batch, layout.device)


def _worth_sharing(segments: Sequence[Segment], lengths: Ints64, layout: BatchLayout) -> list[tuple[int, list[int]]]:
    """`_prompts` of the segments, if computing them once spares enough; else all segments, with 0 tokens."""
    alone = [(0, list(range(len(segments))))]
    if layout.least_spared is None:
        return alone
    prompts = _prompts(segments, layout.mixtures is not None)
    spared = sum(shared * (len(members) - 1) for shared, members in prompts)
    return prompts if spared and spared >= layout.least_spared * lengths.sum() else alone


def _routing_of(
    segments: Sequence[Segment], places: Sequence[Ints64], shape: tuple[int, int], layout: BatchLayout
) -> RoutingRecord | None:
    """Return the choices for the positions of rows [R, L]; None: none is known, or they are not asked for.

    Raises `BadBatchError`: the engine's model has other mixtures of experts."""
    known = [(s.experts, place) for s, place in zip(segments, places, strict=True) if s.experts]
    if (mixtures := layout.mixtures) is None or not known:
        return None
    per_token = known[0][0][0].shape[2]
    for (of_segment, _), _ in known:
        _, count, chosen = of_segment.shape
        largest = of_segment.max(initial=0)
        if (count, chosen) != (mixtures.layers, per_token) or max(largest, chosen - 1) >= mixtures.experts:
            raise BadBatchError(
                f"a sample has ids up to {largest} of {chosen} experts in each of {count} mixtures, and the "
                f"trainer's model has {mixtures.layers} mixtures of {mixtures.experts}: engine and trainer have "
                f"other models"
            )
    ids = np.full((shape[0] * shape[1], mixtures.layers, per_token), OWN, np.int16)
    has_weights = all(weights is not None for (_, weights), _ in known)
    weights = np.zeros(ids.shape, np.float32) if has_weights else None
    for (of_segment, its_weights), place in known:
        ids[place] = of_segment
        if weights is not None:
            weights[place] = its_weights
    arrays = [None if array is None else array.reshape(*shape, *ids.shape[1:]) for array in (ids, weights)]
    return RoutingRecord(*(None if array is None else _tensor(array) for array in arrays))


def _in_pieces(index: Ints64, length: int, pieces: int) -> tuple[Ints64, list[Ints64]]:
    """Where positions of flattened rows [R · length] are in their pieces, and which of them each piece has."""
    if pieces == 1:
        return index, []
    row, position = np.divmod(index, length)
    owner, place = np.divmod(position, length // pieces)
    return row * (length // pieces) + place, [np.flatnonzero(owner == piece) for piece in range(pieces)]


def _multiple(number: int, of: int) -> int:
    """The next one from this number on."""
    return -(-number // of) * of


def _prompts(segments: Sequence[Segment], replays: bool) -> list[tuple[int, list[int]]]:
    """Segments that are alike up to their first learned token: how many tokens that is, and which segments they are.

    Last come those that are like no other, with 0 tokens. Compared by tokens: a group may hold several prompts; and
    where experts are replayed by these, too. Their weights may differ at the last token of a prompt, which engines
    compute for each answer and round differently."""
    by_prompt: dict[bytes, list[int]] = {}
    sizes = []
    for number, segment in enumerate(segments):
        learned = np.flatnonzero(segment.loss_mask)
        sizes.append(int(learned[0]) if len(learned) else len(segment.token_ids) - 1)
        alike = segment.token_ids[: sizes[-1]].tobytes()
        if replays and segment.experts is not None:
            ids, weights = segment.experts
            alike += ids[: sizes[-1]].tobytes()
            alike += b"" if weights is None else weights[: max(sizes[-1] - 1, 0)].tobytes()
        by_prompt.setdefault(alike, []).append(number)
    shared = [(sizes[members[0]], members) for members in by_prompt.values() if len(members) > 1]
    alone = [members[0] for members in by_prompt.values() if len(members) == 1]
    return [*shared, (0, alone)] if alone else shared


def _in_blocks(prompts: Sequence[tuple[int, list[int]]], lengths: Ints64) -> tuple[list[Ints64], list[Block]]:
    """Where the inputs of each segment are in one row, and the blocks of that row."""
    places: list[Ints64] = [np.zeros(0, np.int64)] * len(lengths)
    blocks, start = [], 0
    for shared, alike in prompts:
        by_length = sorted(alike, key=lambda number: (-lengths[number], number))
        for members in [by_length] if shared else _of_one_length(by_length, lengths):
            own_lengths = [int(lengths[number]) - shared for number in members]
            if shared + sum(own_lengths):
                blocks.append(Block(start, shared, tuple(own_lengths)))
            at = start + shared
            for number, length in zip(members, own_lengths, strict=True):
                places[number] = np.concatenate([start + np.arange(shared), at + np.arange(length)])
                at += length
            start = at
    return places, blocks


def _of_one_length(ordered: Sequence[int], lengths: Ints64) -> list[list[int]]:
    """Runs of segments by falling length that are hardly padded."""
    runs: list[list[int]] = []
    for number in ordered:
        if runs and lengths[number] >= LEAST_FILL * lengths[runs[-1][0]]:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _check_ids(segments: Sequence[Segment], vocabulary: int) -> None:
    for segment in segments:
        if segment.token_ids.min() < 0 or segment.token_ids.max() >= vocabulary:
            raise SettingsError(
                f"token ids {segment.token_ids.min()} to {segment.token_ids.max()} in a sample, and the model has "
                f"embeddings for 0 to {vocabulary - 1}: policy.model_name_or_path has a tokenizer of another model"
            )


def _joined(parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _tensor(array: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
