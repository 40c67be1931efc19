"""Rules of the model: meshes, lengths and options against its config.json, where that is on this machine.

A model that is not on this machine passes them, with a warning (`unread_models`). The workers apply the same rules
again (`schema.config.rules.check_models`) when they have fetched its files, before they load weights. `find` says
where files are.
"""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.loading.tomlwrite import toml_value
from schema.config.model_facts import FindFile, ModelFacts, local_file
from schema.config.overrides import refusals
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.mesh import trainer_meshes
from schema.config.rules.named import (
    CRITIC,
    MODEL,
    NAMED_RULES,
    directory_problems,
    facts_at,
    named_models,
    policy_facts,
)
from schema.config.rules.rows import Refusal, Rule
from schema.config.sections.policy import ParallelismConfig
from schema.config.vocabulary import difference, vocabulary_of

MOST_KEPT = 4096
"""Ids in a kept set: 16 KiB per generated token. What asking vLLM for more costs: docs/performance.md."""
_LONGEST = "policy.model_max_length"
_ROUTING = "train.train_policy.routing_replay"
BYTES_OF_A_TOKEN = 9
"""On the wire, of a token without records: id, log-prob and mask."""


def model_agrees(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Everything that the policy's model has against its meshes, its length and its options."""
    facts, problems = policy_facts(config, find)
    if facts is None:
        yield from problems
        return
    mesh, section = config.policy.parallelism, "policy.parallelism"
    yield from heads_are_divided(section, mesh, facts)
    yield from layers_fill_stages(section, mesh, facts)
    yield from experts_are_divided(section, mesh, facts)
    if config.generates:
        yield from engine_divides(config.rollout.parallelism, facts)
        yield from engine_decodes(config, facts)
        yield from engine_has_the_range(config, facts)
        yield from samples_fit_a_request(config, facts)
    yield from experts_are_there(config, facts)
    yield from lengths_are_possible(config, facts)


def logprobs_are_right(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """The trainer keeps sequences of one row apart by their positions, and has one linear layer for the logits."""
    for key, (facts, problems) in named_models(config, find).items():
        if facts is None:
            yield from problems if key != MODEL else ()
            continue
        model, packing = f"{key} = {facts.name} ({facts.kind})", "train.sequence_packing"
        if facts.carries_state and config.train.sequence_packing:
            message = (
                f"true packs several sequences into one row, and layers of {model} carry state from one into the "
                "next (state space, linear attention or convolution)"
            )
            yield Problem(packing, message, True, f"write {packing} = false", related=(key,))
        if facts.deep_head and key != CRITIC:
            message = f"{model} makes its logits by several layers on top of the last hidden state: not trained here"
            yield Problem(key, message, facts.name, "name a model whose output head is one linear layer")


def sequences_can_be_cut(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Context parallelism: each rank has a piece of the positions, and in the attention some heads of all of them."""
    for section, mesh, name, facts in _cut_models(config, find):
        if mesh.cp_size == 1:
            continue
        key, other = f"{section}.cp_size", f"{section}.tp_size"
        model, related = f"{name} = {facts.name}", (name, other)
        if facts.carries_state:
            message = (
                f"{mesh.cp_size} ranks have a piece of a sequence each, and layers of {model} ({facts.kind}) carry "
                "state along all of it (state space, linear attention or convolution)"
            )
            yield Problem(key, message, mesh.cp_size, f"write {key} = 1", related=related)
        elif facts.heads is not None and facts.heads % (mesh.cp_size * mesh.tp_size):
            times = f" * {other} = {mesh.tp_size}" if mesh.tp_size > 1 else ""
            message = f"{mesh.cp_size}{times} does not divide the {facts.heads} attention heads of {model}"
            hint = f"write {key} = {_divisors(facts.heads // mesh.tp_size)}"
            yield Problem(key, message, mesh.cp_size, hint, related=related)


def other_models_agree(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Models next to the policy are cut into as many stages; with a mesh of their own it cuts them."""
    for section, mesh, name, facts in _cut_models(config, find):
        own = section != "policy.parallelism"
        if own:
            yield from heads_are_divided(section, mesh, facts, name)
            yield from experts_are_divided(section, mesh, facts, name)
        if own or name != MODEL:
            yield from layers_fill_stages(section, mesh, facts, name)


def model_warnings(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Warnings: sequences longer than the model was made for, stages of unequal length."""
    for section, mesh, name, cut in _cut_models(config, find):
        if name == MODEL or section != "policy.parallelism":
            yield from uneven_stages(section, mesh, cut, name)
    facts, _ = policy_facts(config, find)
    if facts is not None:
        yield from long_sequences(config, facts)


def engine_loads_what_is_published(config: Config, find: FindFile = local_file) -> list[Problem]:
    """A quantised checkpoint has other tensors than those that a trainer publishes."""
    facts, _ = policy_facts(config, find)
    engine = config.rollout.engine
    if facts is None or not config.generates or not facts.quantised or engine.loads_quantised:
        return []
    message = (
        f"{facts.name} is a quantised model ({facts.quantised}): {engine.title} would expect tensors of that kind, "
        "and versions are published in full precision"
    )
    hint = (
        "name the model that it was made of and quantise rollouts by rollout.quantization, or write "
        'rollout.backend = "transformers"'
    )
    return [Problem(MODEL, message, facts.name, hint, related=("rollout.backend",))]


def _cut_models(config: Config, find: FindFile) -> Iterator[tuple[str, ParallelismConfig, str, ModelFacts]]:
    """Each known model with the mesh that cuts it: its section, the mesh, the key that names the model, its facts."""
    models = named_models(config, find)
    meshes = {trainer_mesh.section.partition(".")[0]: trainer_mesh for trainer_mesh in trainer_meshes(config)}
    names = {role: f"{role}.model_name_or_path" for role in meshes}
    cut = [(role, name if name in models else MODEL) for role, name in names.items()]
    cut += [("policy", name) for name in models if name not in names.values()]
    for role, name in cut:
        facts, trainer_mesh = models[name][0], meshes[role]
        if facts is not None:
            yield trainer_mesh.section, trainer_mesh.mesh, name, facts


def _divisors(*counts: int | None) -> str:
    """`1, 2 or 4`: what divides all of these counts, up to 64."""
    present = [count for count in counts if count is not None]
    fitting = [str(size) for size in range(1, 65) if all(count % size == 0 for count in present)]
    return fitting[0] if len(fitting) == 1 else f"{', '.join(fitting[:-1])} or {fitting[-1]}"


def heads_are_divided(section: str, mesh: ParallelismConfig, facts: ModelFacts, model: str = MODEL) -> list[Problem]:
    """Tensor parallelism of a trainer gives each rank whole heads and whole experts. model: the key that names it."""
    key, size = f"{section}.tp_size", mesh.tp_size
    counts = {"attention heads": facts.heads, "key/value heads": facts.kv_heads, "experts": facts.experts or None}
    for words, count in counts.items():
        if count is not None and count % size:
            message = f"{size} does not divide the {count} {words} of {model} = {facts.name}"
            hint = f"write {key} = {_divisors(*counts.values())}"
            return [Problem(key, message, size, hint, related=(model,))]
    if size > 1 and facts.carries_state:
        message = (
            f"{size} ranks cannot share layers of {model} = {facts.name} ({facts.kind}) that carry state along the "
            "row (state space, linear attention or convolution)"
        )
        return [Problem(key, message, size, f"write {key} = 1", related=(model,))]
    return []


def layers_fill_stages(
    section: str, mesh: ParallelismConfig, facts: ModelFacts, model: str = MODEL
) -> Iterator[Problem]:
    """Every pipeline stage has a layer. model: the key that names it."""
    key, other, stages = (f"{section}.pp_size", f"{section}.virtual_pp_size", mesh.pp_size * mesh.virtual_pp_size)
    if facts.layers is None or mesh.pp_size == 1 or stages <= facts.layers:
        return
    times = f" * {other} = {mesh.virtual_pp_size}" if mesh.virtual_pp_size > 1 else ""
    message = f"{mesh.pp_size}{times} are {stages} stages for the {facts.layers} layers of {model} = {facts.name}"
    hint = f"write {key} = {max(facts.layers // mesh.virtual_pp_size, 1)}"
    yield Problem(key, message, mesh.pp_size, hint, related=(model, other))


def uneven_stages(section: str, mesh: ParallelismConfig, facts: ModelFacts, name: str) -> Iterator[Problem]:
    """Stages of unequal length wait for the longest."""
    stages = mesh.pp_size * mesh.virtual_pp_size
    if facts.layers is None or mesh.pp_size == 1 or stages > facts.layers or facts.layers % stages == 0:
        return
    key = f"{section}.pp_size"
    message = f"{facts.layers} layers of {name} = {facts.name} make {stages} unequal stages: all wait for the longest"
    hint = f"write {key} = {_divisors(facts.layers)}"
    yield Problem(key, message, mesh.pp_size, hint, related=(name,))


def experts_are_divided(
    section: str, mesh: ParallelismConfig, facts: ModelFacts, model: str = MODEL
) -> Iterator[Problem]:
    """Expert parallelism gives each rank whole experts."""
    key, size = f"{section}.ep_size", mesh.ep_size
    if facts.experts is None or size == 1 or (facts.experts and facts.experts % size == 0):
        return
    message = f"{size} does not divide the {facts.experts} experts of {model} = {facts.name}"
    hint = f"write {key} = {_divisors(facts.experts)}"
    if not facts.experts:
        message, hint = f"{size} is for experts, and {model} = {facts.name} has none", f"write {key} = 1"
    yield Problem(key, message, size, hint, related=(model,))


def engine_divides(mesh: ParallelismConfig, facts: ModelFacts) -> Iterator[Problem]:
    """vLLM: heads are divided by tp_size; key/value heads too, or each is repeated on as many ranks as another."""
    section, size = "rollout.parallelism", mesh.tp_size
    key, model = f"{section}.tp_size", f"{MODEL} = {facts.name}"
    heads, kv = facts.heads, facts.kv_heads
    fitting = [
        str(n)
        for n in range(1, 65)
        if (heads is None or heads % n == 0) and (kv is None or kv % n == 0 or n % kv == 0)
    ]
    hint = f"write {key} = {fitting[-1] if len(fitting) == 1 else ', '.join(fitting[:-1]) + ' or ' + fitting[-1]}"
    if heads is not None and heads % size:
        message = f"{size} does not divide the {heads} attention heads of {model}"
        yield Problem(key, message, size, hint, related=(MODEL,))
    elif kv is not None and kv % size and size % kv:
        message = f"{size} neither divides the {kv} key/value heads of {model} nor is a multiple of them"
        yield Problem(key, message, size, hint, related=(MODEL,))
    if facts.layers is not None and mesh.pp_size > facts.layers:
        pp = f"{section}.pp_size"
        message = f"{mesh.pp_size} are more stages than the {facts.layers} layers of {model}"
        yield Problem(pp, message, mesh.pp_size, f"write {pp} = {facts.layers} or less", related=(MODEL,))
    yield from experts_are_divided(section, mesh, facts)


def critic_reads_the_policy(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """A critic of another model has the policy's tokens, as far as files on this machine say."""
    critic, policy = config.critic, config.policy
    if not config.has_critic or not (critic.model_name_or_path or critic.tokenizer_name_or_path):
        return
    key, name = CRITIC, critic.model_name_or_path
    if name is not None:
        yield from directory_problems(key, name, "model", ("config.json",))
        (policy_model, _), (critic_model, _) = (
            policy_facts(config, find),
            facts_at(key, name, critic.model_revision, critic.override_config, find),
        )
        sizes = [facts.vocabulary for facts in (policy_model, critic_model) if facts and facts.vocabulary]
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            message = f"{name} has {sizes[1]} tokens, and {MODEL} = {policy.model_name_or_path} has {sizes[0]}"
            yield Problem(key, message, name, _SAME_TOKENS, related=(MODEL,))
            return
    if critic.tokenizer_name_or_path is not None:
        key, name = "critic.tokenizer_name_or_path", critic.tokenizer_name_or_path
    policy_tokens, critic_tokens = (
        vocabulary_of(*policy.tokenizer, find),
        vocabulary_of(str(name), critic.model_revision, find),
    )
    if policy_tokens and critic_tokens and (differs := difference(policy_tokens, critic_tokens)):
        message = f"{name} numbers other tokens than the policy's tokenizer: {differs}"
        yield Problem(key, message, name, _SAME_TOKENS, related=(MODEL,))


_SAME_TOKENS = "a critic reads what the policy writes: name a model of the same tokenizer, or leave it out"


def engine_decodes(config: Config, facts: ModelFacts) -> list[Problem]:
    """An engine may know attention layers only."""
    engine, key = config.rollout.engine, "rollout.backend"
    if engine.carries_state or not facts.carries_state:
        return []
    message = (
        f"{engine.title} decodes attention layers only, and {MODEL} = {facts.name} ({facts.kind}) has layers that "
        "carry state along the row"
    )
    hint = 'write rollout.backend = "vllm"'
    return [Problem(key, message, config.rollout.backend, hint, related=(MODEL,))]


def engine_has_the_range(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    """Activations of some models are beyond float16, and an engine may refuse to compute them in it."""
    engine, key = config.rollout.engine, "rollout.dtype"
    if config.engine_dtype == "float16" and facts.kind in engine.not_in_float16:
        types = (config.rollout.dtype, config.train.transfer_dtype, config.train.param_dtype)
        names = (key, "train.transfer_dtype", "train.param_dtype")
        chosen = next(name for name, value in zip(names, types, strict=True) if value == "float16")
        model = f"{MODEL} = {facts.name} ({facts.kind})"
        message = f'"float16" is refused by {engine.title} for {model}, whose activations are beyond it'
        yield Problem(chosen, message, "float16", f'write {chosen} = "bfloat16"', related=(MODEL,))


def experts_are_there(config: Config, facts: ModelFacts) -> list[Problem]:
    """Options of mixtures of experts need experts."""
    if facts.experts != 0:
        return []
    options = {
        "policy.freeze_moe_router": config.policy.freeze_moe_router,
        "policy.moe_grouped_gemm": config.policy.moe_grouped_gemm,
        "policy.moe_shared_expert_overlap": config.policy.moe_shared_expert_overlap,
        "train.recompute_moe_layers": config.train.recompute_moe_layers,
    }
    if config.has_critic and config.critic.model_name_or_path in (None, config.policy.model_name_or_path):
        options["critic.freeze_moe_router"] = config.critic.freeze_moe_router
        options["critic.recompute_moe_layers"] = config.critic.recompute_moe_layers
    requests: list[tuple[str, bool | str, str]] = [(key, True, "false") for key, on in options.items() if on]
    if config.replays_routing:
        requests.append((_ROUTING, config.grpo.routing_replay, '"none"'))
    message = f"is for mixtures of experts, and {MODEL} = {facts.name} is none"
    return [
        Problem(key, f"{toml_value(value)} {message}", value, f"write {key} = {neutral}", related=(MODEL,))
        for key, value, neutral in requests
    ]


def samples_fit_a_request(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    """A sample travels whole, with the experts of each of its tokens: one too large would come back as an error."""
    controller = config.controller
    if not config.replays_routing or controller.payload_store or not (facts.mixtures and facts.chosen):
        return
    routing = config.grpo.routing_replay
    number = (1 if (facts.experts or 0) <= 256 else 2) + (4 if routing == "weights" else 0)
    length, each = config.policy.model_max_length, facts.mixtures * facts.chosen * number
    needed, key = length * (BYTES_OF_A_TOKEN + each), "controller.max_request_bytes"
    if needed <= controller.max_request_bytes:
        return
    message = (
        f"{controller.max_request_bytes} is less than the {needed} bytes of a sample of {length} tokens: "
        f"{_ROUTING} = {toml_value(routing)} sends {each} bytes for each, of the {facts.mixtures} mixtures of "
        f"{MODEL} = {facts.name}"
    )
    room = (needed // 2**20 + 2) * 2**20
    hint = f"write {key} = {room}, or let samples travel through a directory (controller.payload_store)"
    yield Problem(key, message, controller.max_request_bytes, hint, related=(_ROUTING, _LONGEST, MODEL))


def lengths_are_possible(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    """vLLM takes no sequence beyond the model's positions; where positions are learned, nobody can."""
    longest = facts.longest
    if longest is None:
        return
    where = f"{longest} positions ({facts.length_key}) of {MODEL} = {facts.name}"
    lengths = {_LONGEST: config.policy.model_max_length}
    if config.generates and config.rollout.max_model_len is not None:
        lengths["rollout.max_model_len"] = config.rollout.max_model_len
    serving = "rollout.max_model_len" if "rollout.max_model_len" in lengths else _LONGEST
    for key, length in lengths.items():
        if length <= longest:
            continue
        if not facts.has_rope:
            reason = "and learned positions end there"
        elif config.generates and config.rollout.engine.bounds_positions and key == serving:
            reason = f"and {config.rollout.engine.title} refuses longer ones"
        else:
            continue
        message = f"{length} tokens are more than the {where}, {reason}"
        yield Problem(key, message, length, _shorter(config, key, longest), related=(MODEL,))


def long_sequences(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    """Rotary positions go on beyond those that were trained, and answers get worse there."""
    length, longest = config.policy.model_max_length, facts.longest
    refused = {problem.key for problem in lengths_are_possible(config, facts)}
    if longest is None or length <= longest or _LONGEST in refused:
        return
    message = (
        f"{length} tokens are more than the {longest} positions ({facts.length_key}) that {MODEL} = {facts.name} "
        "was made for"
    )
    yield Problem(_LONGEST, message, length, _shorter(config, _LONGEST, longest), related=(MODEL,))


def _shorter(config: Config, key: str, longest: int) -> str:
    """The remedy for a length: with the answers, if they would no longer leave room for a prompt."""
    hint = f"write {key} = {longest}"
    if config.generates and config.rollout.max_response_length >= longest:
        hint += f" and rollout.max_response_length = {max(longest // 2, 1)}"
    return hint


def kept_sets_are_bounded(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Samples carry the ids that each of their tokens was drawn from: too many would cost more than the answers."""
    sampling = config.rollout.sampling_config
    if not config.is_grpo or not sampling.filters or sampling.sampling_correction == "raw":
        return
    facts, _ = policy_facts(config, find)
    vocabulary = None if facts is None else facts.vocabulary
    sizes = [size for size in (sampling.top_k, vocabulary) if size is not None and size > 0]
    if sizes and min(sizes) <= MOST_KEPT:
        return
    name = "top_k" if sampling.top_k > 0 else "top_p" if sampling.top_p < 1.0 else "min_p"
    key, value = f"rollout.sampling_config.{name}", getattr(sampling, name)
    of = "a vocabulary that is not known here" if vocabulary is None else f"a vocabulary of {vocabulary}"
    message = f"{value} alone can keep more than {MOST_KEPT} ids of {of} for a token, which training must know"
    hint = (
        f"write rollout.sampling_config.top_k = {MOST_KEPT} or less (next to it), or "
        f'rollout.sampling_config.sampling_correction = "raw"'
    )
    yield Problem(key, message, value, hint, related=(MODEL,))


def overrides_can_act(config: Config) -> Iterator[Problem]:
    """Entries of override_config that other keys decide, or that training switches off."""
    yield from refusals("policy.override_config", config.policy.override_config)
    if config.is_grpo and config.critic.enable:
        yield from refusals("critic.override_config", config.critic.override_config)


READING_RULES = (
    model_agrees,
    logprobs_are_right,
    sequences_can_be_cut,
    other_models_agree,
    engine_loads_what_is_published,
    critic_reads_the_policy,
    kept_sets_are_bounded,
)
"""The rules that read files of models."""
MODEL_RULES = (*READING_RULES, *NAMED_RULES, overrides_can_act)
MODEL_WARNINGS: tuple[Rule, ...] = (
    model_warnings,
    Refusal("policy.trust_remote_code", lambda c: c.policy.trust_remote_code,
        "Python code that comes with {.model_name_or_path~} or its tokenizer runs on these machines",
        "leave it out unless the model needs it and you trust its authors"),
)  # fmt: skip
