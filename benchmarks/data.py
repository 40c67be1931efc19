"""Preparing prompts with two workers, compared with `datasets.map(num_proc=2)`: same rendering, same tokenizer.

Both read one file of prompts of about 300 tokens, render them by the chat template and keep token ids and columns on
disk; each is a process of its own, with its start. Rows per second are of the whole run; the peak is the sum of PSS
of all its processes. CPU seconds are less moved by what else the machine does. `first rows s`: when a job can begin.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import in_turns, medians, options, ratio, report, say
from schema.config import Config

WORDS, WORDS_OF_ROW = 6000, 247
"""Of the language of the rows; its longer words are several tokens."""
VOCABULARY = 8192
EVERY_S = 0.5
"""Seconds between two looks at the memory."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OTHER = """
import sys
from datasets import disable_progress_bars, load_dataset
from transformers import PreTrainedTokenizerFast

kind, data, model, cache, processes = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast.from_pretrained(model)

def prepare(rows):
    texts = [
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in rows["prompt"]
    ]
    return {"token_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}

disable_progress_bars()
rows = load_dataset(kind, data_files=data, split="train", cache_dir=cache)
rows = rows.map(prepare, batched=True, num_proc=int(processes))
print(len(rows), sum(map(len, rows[:1000]["token_ids"])) / len(rows[:1000]["token_ids"]))
"""


def write_rows(path: Path, n: int) -> None:
    """Write n rows of random words, the frequent ones short."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(WORDS)])
    weights = 1 / np.arange(2, WORDS + 2)
    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema([("prompt", pa.list_(turn)), ("answer", pa.string()), ("data_source", pa.string())])
    writer = pq.ParquetWriter(path, schema) if path.suffix == ".parquet" else None
    with path.open("ab") as file:
        for start in range(0, n, 5000):
            size = min(5000, n - start)
            drawn = words[rng.choice(WORDS, (size, WORDS_OF_ROW), p=weights / weights.sum())]
            rows = [
                {"prompt": [{"role": "user", "content": " ".join(text)}], "answer": str(i), "data_source": "made"}
                for i, text in enumerate(drawn.tolist(), start)
            ]
            if writer is None:
                file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            else:
                writer.write_table(pa.Table.from_pylist(rows, schema))
    if writer is not None:
        writer.close()


def make_tokenizer(directory: Path, rows: Path) -> None:
    """Train a byte-level BPE on the first rows."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from controller.data.reading.sources import FileSource

    def texts() -> Iterator[str]:
        for i, row in enumerate(FileSource(rows, rows.name).rows()):
            if i == 2000:
                return
            yield row["prompt"][0]["content"]

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.save_pretrained(directory)


class PeakMemory(threading.Thread):
    """Looks at the memory of a process and of all that it has started. mib: the most at one moment.

    first_s: seconds until a file was there.
    """

    def __init__(self, pid: int, file: Path) -> None:
        super().__init__(daemon=True)
        self._pid, self._file = pid, file
        self.mib, self.first_s = 0.0, 0.0
        self.start()

    def run(self) -> None:
        began = time.perf_counter()
        while Path("/proc", str(self._pid)).exists():
            self.mib = max(self.mib, sum(map(_pss_mib, _family(self._pid))))
            if not self.first_s and self._file.exists():
                self.first_s = time.perf_counter() - began
            time.sleep(EVERY_S)


def _family(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for task in Path("/proc", str(pid), "task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _pss_mib(pid: int) -> float:
    with suppress(OSError, StopIteration):
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))
    return 0.0


def measured(command: list[str], n_rows: int, file: Path) -> dict[str, float]:
    """Run a command to its end. file: which it writes as soon as training can begin."""
    used = _cpu_seconds()
    began = time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        memory = PeakMemory(process.pid, file)
        _, errors = process.communicate()
    seconds = time.perf_counter() - began
    memory.join()
    if process.returncode:
        raise RuntimeError(errors.decode())
    cpu = _cpu_seconds() - used
    first = memory.first_s or seconds
    return {
        "rows/s": n_rows / seconds, "rows per CPU second": n_rows / cpu, "peak MiB": memory.mib, "first rows s": first
    }  # fmt: skip


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    given = options(
        __doc__, rounds=1, rows=(50_000, "of the file"), workers=(2, "processes of each"), format="parquet"
    )
    with tempfile.TemporaryDirectory(prefix="cosmos-benchmark-") as name:
        folder = Path(name)
        data, model = folder / f"rows.{given.format}", folder / "model"
        write_rows(data, given.rows)
        make_tokenizer(model, data)
        say(f"{given.rows:,} rows, {data.stat().st_size / 1e6:,.0f} MB")
        kind = "parquet" if given.format == "parquet" else "json"

        def other() -> dict[str, float]:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            arguments = [kind, str(data), str(model), str(folder / "cache"), str(given.workers)]
            return measured([sys.executable, "-c", OTHER, *arguments], given.rows, folder / "none")

        def own() -> dict[str, float]:
            shutil.rmtree(folder / "run", ignore_errors=True)
            (folder / "run").mkdir()
            (folder / "run" / "config.json").write_text(_config(model, data, given.workers).model_dump_json())
            command = [sys.executable, "-m", "controller.data.prepare", "--run-dir", str(folder / "run"), "--early"]
            return measured(command, given.rows, folder / "run" / "data" / "train.safetensors")

        turns = in_turns({"datasets": other, "ours": own}, given.rounds, warm_up=0)
    rows = {name: medians(figures) for name, figures in turns.items()}
    by_clock, by_cpu = (
        ratio(*([figures[key] for figures in turns[name]] for name in ("ours", "datasets")))
        for key in ("rows/s", "rows per CPU second")
    )
    ours = {key: rows["ours"][key] for key in ("peak MiB", "first rows s")}
    report(given, {"ratio": by_clock, "ratio of CPU": by_cpu, **ours}, rows)


def _config(model: Path, data: Path, workers: int) -> Config:
    policy: dict[str, Any] = {"type": "grpo", "dataset": {"name": str(data)}, "dataloader_num_workers": workers}
    policy["response_column_name"] = "answer"
    return Config.model_validate(
        {
            "policy": {"model_name_or_path": str(model), "model_max_length": 4096},
            "rollout": {"max_response_length": 1024},
            "train": {"train_policy": policy, "max_num_steps": 100},
        }
    )


if __name__ == "__main__":
    main()
