"""The loss of reinforcement learning written out naively: one sample at a time, one token at a time.

It shares nothing with the trainer but the model, so it can be wrong only in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from schema.config import GrpoConfig
from schema.config.sections.teacher import TeacherConfig
from schema.wire.sample import Sample


def token_facts(lm: PreTrainedModel, sample: Sample, temperature: float) -> list[tuple[Tensor, Tensor, float]]:
    """(log-prob, entropy, behaviour log-prob) of each generated token."""
    ids = torch.from_numpy(sample.token_ids.astype("int64"))
    logits = lm(input_ids=ids[None], use_cache=False).logits[0] / temperature
    facts = []
    for position in range(1, len(ids)):
        if sample.loss_mask[position]:
            log_p = torch.log_softmax(logits[position - 1], dim=0)
            entropy = -(log_p.exp() * log_p).sum()
            facts.append((log_p[ids[position]], entropy, float(sample.logprobs[position])))
    return facts


def full_kl(a: PreTrainedModel, b: PreTrainedModel, sample: Sample, temperature: float) -> list[Tensor]:
    """KL(a ‖ b) over the whole vocabulary at each generated token."""
    ids = torch.from_numpy(sample.token_ids.astype("int64"))[None]
    p, q = (torch.log_softmax(m(input_ids=ids, use_cache=False).logits[0] / temperature, dim=1) for m in (a, b))
    return [
        sum((p[i - 1, v].exp() * (p[i - 1, v] - q[i - 1, v]) for v in range(p.shape[1])), torch.zeros(()))
        for i in range(1, ids.shape[1])
        if sample.loss_mask[i]
    ]


def advantages(samples: Sequence[Sample], group_size: int, unbiased: bool) -> list[float]:
    found: list[float] = []
    for start in range(0, len(samples), group_size):
        scores = [sample.header.score for sample in samples[start : start + group_size]]
        known = [score for score in scores if score is not None]
        mean = sum(known) / len(known) if len(known) > 1 else 0.0
        std = math.sqrt(sum((s - mean) ** 2 for s in known) / (len(known) - 1)) if len(known) > 1 else 1.0
        found += [0.0 if s is None else (s - mean) / (1.0 if unbiased else std + 1e-6) for s in scores]
    return found


def grpo_loss(
    lm: PreTrainedModel,
    samples: Sequence[Sample],
    how: GrpoConfig,
    group_size: int = 4,
    temperature: float = 1.0,
    frozen: PreTrainedModel | None = None,
    teachers: Sequence[tuple[TeacherConfig, PreTrainedModel]] = (),
) -> Tensor:
    """The loss of all samples as one optimizer step. frozen: the reference model of KL terms."""
    known: dict[int, list[float]] = {}
    if frozen is not None:
        for number, sample in enumerate(samples):
            known[number] = [float(fact[0].detach()) for fact in token_facts(frozen, sample, temperature)]
    samples = list(samples)
    if how.kl_in_reward.beta:
        for number, sample in enumerate(samples):
            if sample.header.score is not None:
                made = [float(lp) for lp, m in zip(sample.logprobs, sample.loss_mask, strict=True) if m]
                kl = (
                    sum(float(kl.detach()) for kl in full_kl(lm, frozen, sample, temperature))
                    if how.kl_in_reward.type == "full"
                    else sum(
                        _kl(torch.tensor(a - b), how.kl_in_reward.type)
                        for a, b in zip(made, known[number], strict=True)
                    )
                )
                score = sample.header.score - how.kl_in_reward.beta * float(kl)
                header = sample.header.model_copy(update={"score": score})
                samples[number] = replace(sample, header=header)
    values = advantages(samples, group_size, how.unbiased_advantage)
    masked = _masked(samples, group_size, how)
    chosen = [
        (sample, advantage)
        for number, (sample, advantage) in enumerate(zip(samples, values, strict=True))
        if sample.header.score is not None and number not in masked
    ]
    place = {id(sample): number for number, sample in enumerate(samples)}
    told = {id(sample): token_facts(lm, sample, temperature) for sample, _ in chosen}
    kept = {id(sample): _kept(told[id(sample)], advantage, how) for sample, advantage in chosen}
    chosen = [(sample, advantage) for sample, advantage in chosen if any(kept[id(sample)])]
    n_tokens = sum(sum(kept[id(s)]) for s, _ in chosen)
    n_positive = sum(sum(kept[id(s)]) for s, _ in chosen if s.header.score > 0)
    total = torch.zeros(())
    for sample, advantage in chosen:
        facts, counts = told[id(sample)], kept[id(sample)]
        judged = _taught(lm, teachers, sample, temperature, how)
        losses = [_token_loss(facts, i, advantage + judged[i][0], how) + judged[i][1] for i in range(len(facts))]
        whole = full_kl(lm, frozen, sample, temperature) if how.kl_type == "full" else []
        if how.kl_beta:
            for i, (logprob, _, old) in enumerate(facts):
                start = logprob.detach() if how.recomputes_old else old
                weight = torch.exp(logprob - start) if how.unbiased_kl_estimate else 1.0
                kl = whole[i] if whole else _kl(logprob - known[place[id(sample)]][i], how.kl_type)
                losses[i] = losses[i] + how.kl_beta * weight * kl
        losses = [loss - how.entropy_coeff * entropy for loss, (_, entropy, _) in zip(losses, facts, strict=True)]
        losses = [loss for loss, counted in zip(losses, counts, strict=True) if counted]
        summed = torch.stack(losses).sum()
        if how.variant == "gspo" or how.loss_type == "seq-mean-token-mean":
            total = total + summed / (how.unbiased_loss_max_tokens or len(losses)) / len(chosen)
        elif how.loss_type == "seq-mean-token-sum":
            total = total + summed / len(chosen)
        else:
            total = total + summed / n_tokens
        if how.positive_nll_coef and sample.header.score > 0:
            pairs = zip(facts, counts, strict=True)
            nll = -torch.stack([logprob for (logprob, _, _), counted in pairs if counted]).sum()
            total = total + how.positive_nll_coef * nll / n_positive
    return total


def _taught(
    lm: PreTrainedModel,
    teachers: Sequence[tuple[TeacherConfig, PreTrainedModel]],
    sample: Sample,
    temperature: float,
    how: GrpoConfig,
) -> list[tuple[float, Tensor]]:
    """(advantage, loss) that teachers add to each generated token."""
    ids = torch.from_numpy(sample.token_ids.astype("int64"))
    positions = [i for i in range(1, len(ids)) if sample.loss_mask[i]]
    found = [(0.0, torch.zeros(())) for _ in positions]
    for teacher, other in teachers:
        if not teacher.teaches(sample.header.source):
            continue
        logits = [m(input_ids=ids[None], use_cache=False).logits[0] / temperature for m in (lm, other)]
        p, q = (torch.log_softmax(one, 1) for one in (logits[0], logits[1].detach()))
        for n, i in enumerate(positions):
            d = p[i - 1, ids[i]] - q[i - 1, ids[i]]
            old = float(p[i - 1, ids[i]].detach()) if how.recomputes_old else float(sample.logprobs[i])
            advantage, loss = 0.0, torch.zeros(())
            if teacher.loss == "reverse_kl_advantage":
                advantage = float(q[i - 1, ids[i]]) - old
            elif teacher.loss in ("reverse_kl_k2", "reverse_kl_k3"):
                loss = _kl(d, teacher.loss[-2:]).clamp(max=10.0)
            elif teacher.loss == "reverse_kl_full":
                loss = sum((p[i - 1, v].exp() * (p[i - 1, v] - q[i - 1, v]) for v in range(p.shape[1])), loss)
            else:
                loss = _jsd(p[i - 1].exp(), q[i - 1].exp(), teacher.top_k, teacher.beta)
            found[n] = found[n][0] + teacher.weight * advantage, found[n][1] + teacher.weight * loss
    return found


def _jsd(p: Tensor, q: Tensor, k: int, beta: float) -> Tensor:
    """Over the k likeliest tokens of q, and all others together."""
    chosen = q.argsort(descending=True)[:k].tolist()
    others = [v for v in range(len(q)) if v not in chosen]
    pairs = [(p[v], q[v]) for v in chosen] + [(p[others].sum(), q[others].sum())] * bool(others)
    total = torch.zeros(())
    for a, b in pairs:
        m = beta * b + (1 - beta) * a
        total = total + beta * b * torch.log(b / m) + (1 - beta) * a * torch.log(a / m)
    return total


def _masked(samples: Sequence[Sample], group_size: int, how: GrpoConfig) -> set[int]:
    """Which samples with a score get no loss."""
    masks, found = how.sample_masks, set()
    for number, sample in enumerate(samples):
        header, first = sample.header, number // group_size * group_size
        scores = [other.header.score for other in samples[first : first + group_size]]
        known = [score for score in scores if score is not None]
        if header.score is None:
            continue
        mean = sum(known) / len(known)
        too_hard = masks.mean_score_above is not None and mean <= masks.mean_score_above
        too_easy = masks.mean_score_below is not None and mean >= masks.mean_score_below
        cut = masks.truncated and header.finish_reason == "length"
        long = masks.failed_from_tokens is not None and header.response_tokens >= masks.failed_from_tokens
        if too_hard or too_easy or cut or (long and header.score <= 0):
            found.add(number)
    return found


def _kl(d: Tensor, kind: str) -> Tensor:
    """Of d = log π − log π_ref; k3 is bounded by 10."""
    k3 = (torch.exp(-d) - 1 + d).clamp(max=10.0)
    return {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": k3}[kind]


def _token_loss(facts: list[tuple[Tensor, Tensor, float]], i: int, advantage: float, how: GrpoConfig) -> Tensor:
    logprob, _, old = facts[i]
    if how.recomputes_old:  # before the first optimizer step: the policy itself
        old = float(logprob.detach())
    low, high = 1 - how.epsilon_low, 1 + how.epsilon_high
    if how.variant == "gspo":
        moved = [0.0 if how.recomputes_old else float(lp.detach()) - made for lp, _, made in facts]
        mean = sum(moved) / len(moved)
        ratio = torch.exp(logprob - logprob.detach() + mean)
    else:
        ratio = torch.exp(logprob - old)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if how.variant != "gspo" and advantage < 0:
        loss = torch.minimum(loss, torch.tensor(-how.lower_bound_ratio * advantage))
    return loss * _weight(facts, i, how)


def _kept(facts: list[tuple[Tensor, Tensor, float]], advantage: float, how: GrpoConfig) -> list[bool]:
    """Which tokens the loss reads."""
    wanted = how.rollout_correction
    moved = [float(logprob.detach()) - made for logprob, _, made in facts]
    mean = sum(moved) / len(moved)
    if wanted.off_policy_mask is not None and advantage < 0 and -mean > wanted.off_policy_mask:
        return [False] * len(facts)
    values = {"none": [0.0], "token": moved, "sequence": [sum(moved)], "geometric": [mean]}[wanted.reject]
    if len(values) == 1:
        values = values * len(facts)
    low, high = wanted.reject_below, wanted.reject_above
    return [(low is None or math.exp(v) >= low) and (high is None or math.exp(v) <= high) for v in values]


def _weight(facts: list[tuple[Tensor, Tensor, float]], i: int, how: GrpoConfig) -> float:
    """Of the policy before the first optimizer step over the one that made the tokens."""
    differences = [float(logprob.detach()) - made for logprob, _, made in facts]
    if how.use_decoupled_loss:
        weight, cap = math.exp(differences[i]), how.behav_imp_weight_cap
        return 0.0 if cap is not None and weight > cap else weight
    if how.rollout_correction.weights == "none":
        return 1.0
    chosen = differences[i] if how.rollout_correction.weights == "token" else sum(differences)
    return min(math.exp(max(min(chosen, 20), -20)), how.rollout_correction.cap)
