"""What this project assumes of vLLM's two model runners, each assumption by its name.

On a CPU vLLM takes runner V1, on CUDA V2. The sources of both are read here: a version of vLLM that differs fails
under the name of what differs. What an engine shows of it is `test_contract.TestVllm`, whose report names the runner
that it met; without a GPU it is run here for V2 too, whose kernels Triton's interpreter computes on the CPU.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rollout_worker.engines.vllm.arguments import MOST_HELD_BACK
from tests.support import interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

ROOT = Path(__file__).parents[4]
CONTRACT = "test_contract.py::TestVllm"


@dataclass(frozen=True)
class Source:
    """A definition in vLLM's sources. has: what stands in it, in this order. lacks: what does not."""

    file: str
    name: str
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


RUNNERS = {"V1": "v1/worker/gpu_model_runner.py", "V2": "v1/worker/gpu/model_runner.py"}
WORKER, CONFIG = "v1/worker/gpu_worker.py", "config/vllm.py"
SAMPLERS = {"V1": "v1/sample/sampler.py", "V2": "v1/worker/gpu/sample/sampler.py"}
STATES, BIAS = "v1/worker/gpu/sample/states.py", "v1/worker/gpu/sample/logit_bias.py"
FILTERS, EXPERTS = "v1/sample/ops/topk_topp_sampler.py", "distributed/aux_output_connector/connector.py"
SWITCH = "use_v2_model_runner"


def of_both(*sources: Source) -> dict[str, tuple[Source, ...]]:
    """Code that both runners share."""
    return dict.fromkeys(RUNNERS, sources)


ASSUMPTIONS: dict[str, dict[str, tuple[Source, ...]]] = {
    # By the environment, else V2 where Triton is; its workers have the answer as an attribute.
    "the runner is chosen by VLLM_USE_V2_MODEL_RUNNER": of_both(
        Source(CONFIG, f"VllmConfig.{SWITCH}", ("envs.VLLM_USE_V2_MODEL_RUNNER", "not HAS_TRITON", "return True")),
        Source(WORKER, "Worker.__init__", (f"self.{SWITCH} = vllm_config.{SWITCH}",)),
    ),
    # `WorkerExtension.cosmos_make_ready`: V1 makes it at the measurement of memory, which a CPU leaves out.
    "the memory of a later pipeline stage is an attribute": {
        name: (
            Source(
                file, "GPUModelRunner.__init__", ("self.model_config = ", "self.device = ", "self.max_num_tokens = ")
            ),
            Source(
                file, "GPUModelRunner.__init__", ("self.intermediate_tensors: IntermediateTensors | None = None",)
            ),
            *more,
        )
        for (name, file), more in zip(
            RUNNERS.items(),
            (
                (),
                (
                    Source(
                        RUNNERS["V2"], "GPUModelRunner.load_model", ("self.intermediate_tensors = self.model.make",)
                    ),
                ),
            ),
            strict=True,
        )
    },
    # `StoreWeightTransferEngine` writes the parameters of this model where they lie.
    "the transfer engine gets the model itself": {
        "V1": (
            Source(WORKER, "Worker.load_model", ("WeightTransferEngineFactory", "self.model_runner.get_model()")),
            Source(RUNNERS["V1"], "GPUModelRunner.get_model", ("return self.model.unwrap()", "return self.model")),
        ),
        "V2": (
            Source(WORKER, "Worker.load_model", ("WeightTransferEngineFactory", "self.model_runner.get_model()")),
            Source(RUNNERS["V2"], "GPUModelRunner.get_model", ("return self.model",)),
        ),
    },
    "an update of weights passes the runner by": of_both(
        Source(WORKER, "Worker._start_weight_update", ("weight_transfer_engine.start_weight_update()",), (SWITCH,)),
        Source(
            WORKER, "Worker.update_weights", ("weight_transfer_engine.update_weights(",), (SWITCH, "model_runner")
        ),
        Source(WORKER, "Worker.finish_weight_update", ("finish_weight_update()", "reset_lora_state()"), (SWITCH,)),
    ),
    # `adapters`: loaded into the manager, found by its number.
    "adapters are those of the model's manager": {
        name: (
            Source(
                file,
                "GPUModelRunner.load_model",
                ("self.load_lora_model(self.model, self.vllm_config, self.device)",),
            ),
            Source("lora/model_manager.py", "LoRAModelManager.__init__", ("self.model.lora_manager = self",)),
        )
        for name, file in RUNNERS.items()
    },
    "a request brings the number of its adapter": {
        "V1": (Source(RUNNERS["V1"], "GPUModelRunner._update_states", ("lora_request=new_req_data.lora_request",)),),
        "V2": (Source(RUNNERS["V2"], "GPUModelRunner.add_requests", ("self.lora_state.add_request(req_id,",)),),
    },
    "each request draws by its own seed": {
        "V1": (Source(RUNNERS["V1"], "GPUModelRunner._update_states", ("manual_seed(sampling_params.seed)",)),),
        "V2": (
            Source(
                STATES, "SamplingStates.add_request", ("seed = sampling_params.seed", "self.seeds.np[req_idx] = seed")
            ),
            Source(SAMPLERS["V2"], "Sampler._sample_random", ("gumbel_sample(", "self.sampling_states.seeds.gpu")),
        ),
    },
    "a fused sampler, which has no seeds, leaves such requests alone": {
        "V1": (Source(FILTERS, "TopKTopPSampler.forward_cuda", ("or generators", "self.forward_native(")),),
        "V2": (Source(SAMPLERS["V2"], "Sampler.sample", ("any_explicit_seed(", "fused_sampler_eligible")),),
    },
    # Else a CPU's generators could not do it, and `rollout.enable_chunked_prefill` would not be refused there alone.
    "an unfinished prompt costs no draw": {
        "V1": (Source(RUNNERS["V1"], "", ("gen.set_offset(gen.get_offset() - 4)",)),),
        "V2": (Source(SAMPLERS["V2"], "Sampler.__call__", ("get_num_sampled_and_rejected(", "prefill_len")),),
    },
    "the mode of log-probs reaches the sampler": {
        "V1": (Source(RUNNERS["V1"], "GPUModelRunner.__init__", ("logprobs_mode=self.model_config.logprobs_mode",)),),
        "V2": (
            Source(RUNNERS["V2"], "GPUModelRunner.load_model", ("'logprobs_mode': self.model_config.logprobs_mode",)),
        ),
    },
    "log-probs are of the distribution sampled from": {
        "V1": (
            Source(SAMPLERS["V1"], "Sampler.sample", ("'processed_logprobs'", "self.compute_logprobs(logits)")),
            Source(FILTERS, "TopKTopPSampler.forward_native", ("apply_top_k_top_p", "log_softmax(dim=-1")),
        ),
        "V2": (
            Source(SAMPLERS["V2"], "Sampler.__call__", ("PROCESSED_LOGPROBS_MODES", "logits = processed_logits")),
            Source("config/model.py", "", ("PROCESSED_LOGPROBS_MODES", "'processed_logprobs'")),
        ),
    },
    "raw log-probs are of logits that nothing has changed": {
        "V1": (
            Source(SAMPLERS["V1"], "Sampler.forward", ("'raw_logprobs'", "compute_logprobs(logits)", "apply_logits")),
        ),
        "V2": (
            Source(SAMPLERS["V2"], "Sampler.apply_sampling_params", ("torch.empty_like(logits,", ".copy_(logits)")),
        ),
    },
    # `adapter.kept_sets`, `policy_worker.model.logits.drawn`
    "penalties, temperature, min_p, top_k and top_p act in this order": {
        "V1": (
            Source(SAMPLERS["V1"], "Sampler.forward", ("self.apply_logits_processors(", "self.sample(")),
            Source(
                SAMPLERS["V1"],
                "Sampler.sample",
                ("self.apply_temperature(", "argmax_invariant", "topk_topp_sampler("),
            ),
        ),
        "V2": (
            Source(
                SAMPLERS["V2"],
                "Sampler.apply_sampling_params",
                ("processor.apply(logits, ctx)", "apply_temperature(", "apply_min_p(", "apply_top_k_top_p("),
            ),
        ),
    },
    "both filter by one function": {
        "V1": (Source(FILTERS, "TopKTopPSampler.forward_native", ("apply_top_k_top_p(logits, k, p)",)),),
        "V2": (
            Source(SAMPLERS["V2"], "Sampler._sample_random", ("apply_top_k_top_p(processed_logits, top_k, top_p)",)),
        ),
    },
    "log-probs are those of the token, then of the likeliest ones": {
        "V1": (Source(SAMPLERS["V1"], "Sampler.gather_logprobs", ("torch.topk(", "cat((token_ids, topk_indices)")),),
        "V2": (
            Source(
                "v1/worker/gpu/sample/logprob.py",
                "compute_topk_scores",
                ("torch.topk(", "cat((logprob_token_ids, topk_indices)"),
            ),
        ),
    },
    "-1 asks for log-probs of the whole vocabulary": {
        "V1": (
            Source("v1/worker/gpu_input_batch.py", "InputBatch.add_request", ("sampling_params.logprobs == -1",)),
        ),
        "V2": (
            Source(STATES, "SamplingStates.add_request", ("num_logprobs == -1", "num_logprobs = self.vocab_size")),
        ),
    },
    # V2 holds back a bounded number of tokens: `arguments.check_held_back`.
    "min_tokens holds back the stop tokens that a request names": {
        "V1": (Source("v1/sample/logits_processor/builtin.py", "MinTokensLogitsProcessor", ("all_stop_token_ids",)),),
        "V2": (
            Source(BIAS, "LogitBiasState.add_request", ("all_stop_token_ids", "> MAX_NUM_STOP_TOKEN_IDS", "raise")),
        ),
    },
    # Penalties, min_tokens and draws go on where they were: V1 keeps the state, V2 makes it of all tokens.
    "a request that is computed again goes on with its own tokens": {
        "V1": (Source(RUNNERS["V1"], "GPUModelRunner._update_states", ("resumed_req_ids", "output_token_ids")),),
        "V2": (
            Source("v1/core/sched/scheduler.py", "", ("scheduled_new_reqs.extend(scheduled_resumed_reqs)",)),
            Source(
                RUNNERS["V2"],
                "GPUModelRunner.add_requests",
                ("prompt_len = new_req_data.prompt_len", "all_token_ids=new_req_data.prefill_token_ids"),
            ),
        ),
    },
    "versions of tokens are counted outside of the runner": {
        name: (
            Source("v1/engine/core.py", "EngineCore._attach_weight_version", ("eco.weight_version =",), (SWITCH,)),
            Source(file, "", lacks=("weight_version",)),
        )
        for name, file in RUNNERS.items()
    },
    "pausing and sleeping pass the runner by": of_both(
        Source("v1/engine/core.py", "EngineCoreProc.pause_scheduler", ("PauseState.PAUSED_ALL",), (SWITCH,)),
        Source(WORKER, "Worker.sleep", ("self.sleep_mode_backend.suspend(level)",), (SWITCH,)),
        Source(WORKER, "Worker.wake_up", ("self.sleep_mode_backend.resume(tags)",), (SWITCH,)),
    ),
    # V1 has none of it: `adapter.engine_config` refuses `routing_replay` where V2 is turned off.
    "V2 alone returns the experts that were chosen, each token's once": {
        "V1": (
            Source(CONFIG, "VllmConfig._verify_aux_output_compatibility", (f"not self.{SWITCH}", "raise ValueError")),
        ),
        "V2": (
            Source(CONFIG, "VllmConfig._verify_aux_output_compatibility", ("pipeline_parallel_size > 1",)),
            Source(EXPERTS, "AuxOutputSchedulerConnector.build_connector_meta", ("request.num_tokens - 1",)),
            Source(EXPERTS, "AuxOutputSchedulerConnector.reset", ("self._generation += 1",)),
        ),
    },
    # On CUDA a step is scheduled while the one before runs, here by `tests.support.interpreted` alone.
    "steps overlap on accelerators, with either runner": of_both(
        Source("platforms/cpu.py", "CpuPlatform.check_and_update_config", ("async_scheduling = False",)),
        Source(CONFIG, "VllmConfig.max_concurrent_batches", ("async_scheduling", SWITCH)),
    ),
}


@functools.cache
def tree(file: str) -> ast.Module:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse((Path(spec.origin).parent / file).read_text())


def text_of(file: str, name: str) -> str:
    """A definition without comments, as Python writes it; the whole module where no name is given."""
    node: ast.AST = tree(file)
    for part in filter(None, name.split(".")):
        defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, defined) and child.name == part]
        assert inner, f"{file} has no {name}"
        node = inner[-1]
    return ast.unparse(node)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("assumption", ASSUMPTIONS)
def test_the_source_of_each_runner_keeps_what_is_assumed(assumption: str, runner: str) -> None:
    for source in ASSUMPTIONS[assumption][runner]:
        rest, place = text_of(source.file, source.name), f"{source.file}: {source.name or 'the module'}"
        for text in source.lacks:
            assert text not in rest, f"{runner}: {assumption}: {place} has {text!r}"
        for text in source.has:
            _, found, rest = rest.partition(text)
            assert found, (
                f"{runner}: {assumption}: {place} does not have {text!r}, or not in the order of {source.has}"
            )


def test_the_second_runner_holds_back_as_many_tokens_as_we_say() -> None:
    assert f"MAX_NUM_STOP_TOKEN_IDS = {MOST_HELD_BACK}" in text_of(BIAS, "")


SHOWN = (
    "(on_policy_is_one or sets_they_were) and all or a_sample_depends or min_tokens_postpones or weights_change or "
    "written_in_place or model_runner"
)
"""Tests of an engine that show most of what is assumed, in less time than all of them: the interpreter is slow."""
LONG = pytest.mark.soak
SECONDS = 1800
"""After which the process counts as hanging."""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="here the tests themselves meet this runner")
@pytest.mark.parametrize(
    ("tests", "which"),
    [
        pytest.param(CONTRACT, SHOWN, id="contract"),
        pytest.param(CONTRACT, "", id="whole contract", marks=LONG),
        pytest.param("test_engine.py", "TestAdapters or TestTensorParallel", id="adapters, ranks", marks=LONG),
        pytest.param("test_kinds.py", "each_rank and qwen3-", id="stages, copies", marks=LONG),
    ],
)
def test_the_second_runner_passes_the_tests_of_the_first(tmp_path: Path, tests: str, which: str) -> None:
    """In a process of its own: each difference has the name of its test."""
    report = tmp_path / "junit.xml"
    path = f"{Path(__file__).parent}/{tests}"
    command = [sys.executable, "-m", "pytest", path, "-n", "0", "-k", which, f"--junitxml={report}"]
    folder = str(Path(interpreted.__file__).parent)
    env = {**os.environ, "PYTHONPATH": folder, "VLLM_USE_V2_MODEL_RUNNER": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert report.exists(), done.stdout + done.stderr
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    bad = [
        case.get("name") for case in suite.iter("testcase") if {"failure", "error"} & {child.tag for child in case}
    ]
    assert (bad, done.returncode) == ([], 0), done.stdout[-4000:]
    if tests == CONTRACT:
        met = {entry.get("name"): entry.get("value") for entry in suite.iter("property")}
        assert met == {"model_runner": "V2", "schedules_ahead": "True"}
