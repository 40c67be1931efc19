"""The running samples: admitted, decoded one token at a time, removed when they end. Synchronous.

    admit(request, indices) ─▶ rows of the window; the prompt's keys and values computed once for all of them
    step()                  ─▶ one forward, one token for every row; the samples that ended
    recompute(version)      ─▶ new weights: the cache of every row computed again

The newest token of a row is known but not computed yet (see `window.py`), a new row's included: its last prompt
token. So sampling happens in `step` alone, and filling the cache never needs logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout_worker.engines.base import Generation, GenerationRequest, SamplingSettings
from rollout_worker.engines.transformers import sampler
from rollout_worker.engines.transformers.routing import Routing
from rollout_worker.engines.transformers.sampler import StopRules
from rollout_worker.engines.transformers.views import DecodeView, IntArray, PromptView, ResponseView, WindowView
from rollout_worker.engines.transformers.window import Window


@dataclass(slots=True)
class DecodedRow:
    """It holds what is known of one running sample, apart from its columns."""

    request: GenerationRequest
    index: int
    batch: int
    """Rows of one admission of one request have the same number, hence the same prompt at the same columns."""
    versions: list[tuple[int, int]]
    """(first response token, weight version) of each run."""
    kept: list[npt.NDArray[np.int32]]
    """Kept sets of the response tokens, where the settings want them."""


COLUMNS = np.dtype([("prompt", np.int64), ("limit", np.int64), ("rules", np.int64), ("seed", np.uint64)])
"""Numbers of every row, vectorised: entry i belongs to row i of the window."""


class Decoder:
    """All running samples of one model. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        *,
        max_model_len: int,
        fill_tokens: int,
        keep_cache: bool,
        routing: Routing | None = None,
    ) -> None:
        """`fill_tokens`: most tokens of one forward that fills the cache. `keep_cache`: never recompute.
        `routing`: records which experts are chosen."""
        self.model, self.tokenizer, self.eos_token_ids = model, tokenizer, eos_token_ids
        self.max_model_len, self.fill_tokens, self.keep_cache = max_model_len, fill_tokens, keep_cache
        self.routing = routing
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.window = Window(model.device, model.dtype)
        self.version = -1
        self._cold = False
        """Whether keys and values are gone, so that they are computed again even where they are kept."""
        self.rows: list[DecodedRow] = []
        self.columns = np.zeros(0, COLUMNS)
        self.rules: list[StopRules] = []
        self._batches = 0
        self.tokens_generated = 0
        self.most_tokens = 0
        """Generated for the longest of the rows, as of the last step."""

    # ---- admission ----------------------------------------------------------------------------------------

    def longest(self, request: GenerationRequest) -> int:
        """The most tokens that a sample of this request can have, prompt included."""
        return min(len(request.prompt_token_ids) + request.settings.max_tokens, self.max_model_len)

    def clear(self) -> None:
        """Begin with an empty window, so that nothing depends on what it held. There must be no rows."""
        assert not self.rows
        self.window = Window(self.model.device, self.model.dtype)

    def admit(self, batch: Sequence[tuple[GenerationRequest, Sequence[int]]]) -> int:
        """Begin samples `indices` of each request of the batch. Returns the tokens computed for it."""
        total = sum(len(indices) for _, indices in batch)
        widest = max(len(request.prompt_token_ids) for request, _ in batch)
        self.window.make_room(self.window.n + total, widest)
        prompts: list[IntArray] = []
        first = self.window.n
        for request, indices in batch:
            prompt = np.asarray(request.prompt_token_ids, np.int64)
            prompts += [prompt] * len(indices)
            self._batches += 1
            limit = self.longest(request) - len(prompt)
            rules = {i: self._rules(request.settings_of(i)) for i in indices}
            columns = np.array([(len(prompt), limit, rules[i], request.seeds[i]) for i in indices], COLUMNS)
            self.columns = np.concatenate([self.columns, columns])
            self.rows += [DecodedRow(request, index, self._batches, [(0, self.version)], []) for index in indices]
        self.window.append(prompts)
        self._fill_prompts(range(first, self.window.n))
        return sum(len(request.prompt_token_ids) for request, _ in batch)

    def _rules(self, settings: SamplingSettings) -> int:
        """The number of these settings among all that were ever used: a job has two or three."""
        for number, rules in enumerate(self.rules):
            if rules.settings == settings:
                return number
        device = self.window.device
        self.rules.append(StopRules(settings, self.eos_token_ids, self.vocabulary, self.tokenizer, device))
        return len(self.rules) - 1

    # ---- cache --------------------------------------------------------------------------------------------

    def tokens_to_recompute(self) -> int:
        """Return what `recompute` would compute: each prompt once, all response tokens."""
        prompts = {row.batch: int(tokens) for row, tokens in zip(self.rows, self.columns["prompt"], strict=True)}
        return sum(prompts.values()) + int(self._generated().sum())

    def steps_left(self) -> int:
        """The most tokens that any running sample can still get."""
        return int((self.columns["limit"] - self._generated()).max()) if self.rows else 0

    def recompute(self) -> None:
        """Compute the cache of all rows with the model's present weights."""
        if not self.rows:
            return
        self._fill_prompts(range(len(self.rows)))
        self._fill_responses()

    def release_cache(self) -> None:
        """Drop the cache of all rows; the next `set_version` computes it again."""
        self.window.release()
        self._cold = True

    def _fill_prompts(self, rows: range) -> None:
        """Cache of all prompt tokens but the last, computed once for all rows that were admitted together."""
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.rows[row].batch, []).append(row)
        leaders = [members for members in groups.values() if self.columns["prompt"][members[0]] > 1]
        leaders.sort(key=lambda members: self.columns["prompt"][members[0]])
        for chunk in _chunks([int(self.columns["prompt"][m[0]]) - 1 for m in leaders], self.fill_tokens):
            self._fill_prompt_chunk([leaders[i] for i in chunk])

    def _fill_prompt_chunk(self, groups: list[list[int]]) -> None:
        window, device = self.window, self.window.device
        lengths = np.array([self.columns["prompt"][members[0]] - 1 for members in groups])
        width = int(lengths.max())
        ids = torch.zeros(len(groups), width, dtype=torch.int64, device=device)
        for i, members in enumerate(groups):
            begin = int(window.start[members[0]])
            ids[i, width - lengths[i] :] = window.tokens[members[0], begin : begin + int(lengths[i])]
        rows = np.concatenate(groups)
        prompt_of_row = np.repeat(np.arange(len(groups)), [len(m) for m in groups])
        view = PromptView(window, width, rows, prompt_of_row, lengths[prompt_of_row])
        columns = torch.arange(width, device=device)
        self._forward(ids, columns, columns, torch.from_numpy(width - lengths).to(device), view)

    def _fill_responses(self) -> None:
        """Cache of the last prompt token and all response tokens but the newest, on top of the prompts'."""
        window = self.window
        counts = self._generated()
        order = np.argsort(counts, kind="stable")
        order = order[counts[order] > 0]
        for chunk in _chunks([int(count) for count in counts[order]], self.fill_tokens):
            rows = order[chunk]
            first, low = window.column - int(counts[rows].max()), int(window.start[rows].min())
            # A row without that many response tokens computes some of its prompt again, or padding if it is
            # shorter than that: padding sees itself alone and is masked for all others.
            index = torch.from_numpy(rows).to(window.device)
            ids = window.tokens[index, first : window.column]
            view = ResponseView(window, rows, first, min(low, first))
            queries = torch.arange(first, window.column, device=window.device)
            keys = torch.arange(view.low, window.column, device=window.device)
            self._forward(ids, queries, keys, torch.from_numpy(window.start[rows]).to(window.device), view)

    def _forward(
        self, ids: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, start: torch.Tensor, view: WindowView
    ) -> None:
        """One forward for its keys and values: row i's tokens begin at column start[i]."""
        same_row = queries[:, None] == keys
        causal = queries[:, None] >= keys
        allowed = (causal & (keys >= start[:, None, None])) | same_row
        positions = (queries - start[:, None]).clamp_(min=0)
        with self._recorded_by(view):
            self.model(
                input_ids=ids,
                attention_mask=allowed[:, None],
                position_ids=positions,
                past_key_values=view,
                use_cache=True,
                logits_to_keep=1,
            )

    def _recorded_by(self, view: WindowView) -> AbstractContextManager[None]:
        """The experts that a forward chooses go to the window, if they are wanted."""
        return nullcontext() if self.routing is None else self.routing.into(view.record)

    # ---- decoding -----------------------------------------------------------------------------------------

    def _generated(self) -> IntArray:
        """Response tokens of each row so far."""
        generated: IntArray = self.window.column + 1 - self.window.start - self.columns["prompt"]
        return generated

    def step(self) -> list[Generation]:
        """One token for every row; returns the samples that ended with it. There must be rows."""
        window = self.window
        window.make_room(window.n, 0)
        n, column, low = window.n, window.column, window.low
        positions = torch.from_numpy(column - window.start).to(window.device)
        view = DecodeView(window)
        with self._recorded_by(view):
            output = self.model(
                input_ids=window.tokens[:n, column : column + 1],
                attention_mask=window.bias[:n, None, None, low : column + 1],
                position_ids=positions[:, None],
                past_key_values=view,
                use_cache=True,
                logits_to_keep=1,
            )
        logits = output.logits[:, -1].float()
        tokens, logprobs = self._draw(logits)
        window.tokens[:n, column + 1] = tokens
        window.logprobs[:n, column + 1] = logprobs
        window.column += 1
        self.tokens_generated += n
        self.most_tokens = int(self._generated().max())
        return self._finish(tokens.cpu().numpy())

    def _draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        generated = self._generated()
        uniform = sampler.uniforms(self.columns["seed"], generated)
        used = np.unique(self.columns["rules"])
        if len(used) == 1:
            return self._draw_rows(logits, int(used[0]), uniform, generated, None)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for number in used:
            rows = np.flatnonzero(self.columns["rules"] == number)
            index = torch.from_numpy(rows).to(logits.device)
            drawn = self._draw_rows(logits[index], int(number), uniform[rows], generated[rows], rows)
            tokens[index], logprobs[index] = drawn
        return tokens, logprobs

    def _draw_rows(
        self,
        logits: torch.Tensor,
        number: int,
        uniform: npt.NDArray[np.float64],
        generated: IntArray,
        rows: IntArray | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rules = self.rules[number]
        history = self._history(rows) if sampler.needs_history(rules.settings) else None
        forbidden = rules.forbidden(generated)
        tokens, logprobs, kept = sampler.draw(logits, rules.settings, uniform, history, forbidden)
        if kept is not None:
            numbers = range(len(tokens)) if rows is None else rows.tolist()
            for row, ids in zip(numbers, sampler.kept_ids(kept), strict=True):
                self.rows[row].kept.append(ids)
        return tokens, logprobs

    def _history(self, rows: IntArray | None) -> sampler.TokenHistory:
        window = self.window
        chosen = np.arange(window.n) if rows is None else rows
        columns = torch.arange(window.low, window.column + 1, device=window.device)
        start = torch.from_numpy(window.start[chosen]).to(window.device)[:, None]
        prompt = torch.from_numpy(self.columns["prompt"][chosen]).to(window.device)[:, None]
        tokens = window.tokens[torch.from_numpy(chosen).to(window.device), window.low : window.column + 1]
        return sampler.TokenHistory(tokens, columns >= start, columns >= start + prompt)

    # ---- the end of a sample ------------------------------------------------------------------------------

    def _finish(self, tokens: IntArray) -> list[Generation]:
        generated = self._generated()
        at_limit = generated >= self.columns["limit"]
        ended: dict[int, int | str | None] = dict.fromkeys(np.flatnonzero(at_limit).tolist())
        for number in np.unique(self.columns["rules"]):
            rules = self.rules[number]
            rows = np.flatnonzero(self.columns["rules"] == number)
            for row in rows[rules.ends(tokens[rows])].tolist():
                ended[row] = int(tokens[row])
            if rules.strings:
                for row in rows.tolist():
                    if ended.get(row) is None:
                        stop_string = rules.find(self._response(row))
                        if stop_string is not None:
                            ended[row] = stop_string
        finished = [self._generation(row, reason) for row, reason in ended.items()]
        self._remove(list(ended))
        return finished

    def _response(self, row: int) -> npt.NDArray[np.int32]:
        begin = int(self.window.start[row] + self.columns["prompt"][row])
        tokens = self.window.tokens[row, begin : self.window.column + 1]
        return np.asarray(tokens.cpu().numpy(), np.int32)

    def _generation(self, row: int, reason: int | str | None) -> Generation:
        entry = self.rows[row]
        begin = int(self.window.start[row] + self.columns["prompt"][row])
        logprobs = self.window.logprobs[row, begin : self.window.column + 1].cpu().numpy().copy()
        versions = np.array(entry.versions, np.int32)
        return Generation(
            request_id=entry.request.request_id,
            index=entry.index,
            token_ids=self._response(row),
            logprobs=logprobs,
            version_starts=versions[:, 0].copy(),
            version_values=versions[:, 1].copy(),
            finish_reason="length" if reason is None else "stop",
            stop_reason=reason,
            kept_counts=np.array([len(ids) for ids in entry.kept], np.int32),
            kept_ids=np.concatenate([np.zeros(0, np.int32), *entry.kept]),
            held_ids=self.rules[self.columns["rules"][row]].held_ids,
            **self._chosen(row, entry.request.settings.routing),
        )

    def _chosen(self, row: int, wanted: str) -> dict[str, Any]:
        """The experts that a row was sent to, at all its tokens but the newest, as fields of a `Generation`."""
        if self.routing is None or wanted == "none":
            return {}
        (layer,), computed = self.window.choices, slice(int(self.window.start[row]), self.window.column)
        ids, weights = (buffer[row, :, computed].transpose(0, 1) for buffer in (layer.keys, layer.values))
        chosen, weighted = self.routing.recorded(ids, weights)
        return {"expert_ids": chosen, **({"expert_weights": weighted} if wanted == "weights" else {})}

    def _remove(self, rows: list[int]) -> None:
        if not rows:
            return
        moves = self.window.remove(rows)
        for source, target in moves:
            self.rows[target], self.columns[target] = self.rows[source], self.columns[source]
        del self.rows[self.window.n :]
        self.columns = self.columns[: self.window.n]

    def drop(self, request_ids: Collection[str]) -> None:
        """Forget all running samples of these requests."""
        self._remove([i for i, row in enumerate(self.rows) if row.request.request_id in request_ids])

    def set_version(self, version: int) -> None:
        """New weights are in the model: recompute the cache (unless it is kept) and note the version."""
        self.version = version
        if self.keep_cache and not self._cold:
            return
        self._cold = False
        self.recompute()
        for row, generated in zip(self.rows, self._generated(), strict=True):
            if row.versions[-1][0] == generated:
                row.versions[-1] = (int(generated), version)
            elif row.versions[-1][1] != version:
                row.versions.append((int(generated), version))


def _chunks(sizes: list[int], budget: int) -> list[list[int]]:
    """Cut rising sizes into runs of which none, padded to its largest, exceeds the budget (if it has several)."""
    runs: list[list[int]] = []
    for i, size in enumerate(sizes):
        if runs and size * (len(runs[-1]) + 1) <= budget:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
