"""Probes of uploads, against a real object store; and of what decides whether the same bits come out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policy_worker.checkpoints.uploads import make_uploader
from rollout_worker.engines.transformers.settings import settings_of
from schema.config import Config
from tests.liveness.probe import Place, With, changed, grpo, watch
from tests.support.objects import ObjectStore, running_objects

BUCKETS = ("cosmos-one", "cosmos-two")
_STORES: dict[Path, ObjectStore] = {}


def uploaded(config: Config, place: Place) -> dict[str, list[str]]:
    """What a checkpoint and a final model leave in each bucket."""
    store, run_dir = _store(place), place.root / "uploading-run"
    for name in ("checkpoints/step-00000004", "final"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
        (run_dir / name / "config.json").write_text("{}")
    with _environment(store.environment):
        uploader = make_uploader(config, run_dir)
        uploader.offer(run_dir / "checkpoints" / "step-00000004", 4, final=False)
        uploader.offer(run_dir / "final", 4, final=True)
        uploader.finish(60)
        uploader.close()
    found = {bucket: store.keys(bucket) for bucket in BUCKETS}
    for bucket, keys in found.items():
        for key in keys:
            store.client().delete_object(Bucket=bucket, Key=key)
    for record in (run_dir / "uploads").glob("*"):
        record.unlink()
    return found


def _store(place: Place) -> ObjectStore:
    if place.root not in _STORES:
        _STORES[place.root] = place.stack.enter_context(running_objects(*BUCKETS))
    return _STORES[place.root]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def places_on_the_hub(config: Config, place: Place) -> list[str]:
    """Where a final model would be committed."""
    return make_uploader(config, place.directory()).places("final", final=True)


saving = changed(grpo, {"train.ckpt.enable_checkpoint": True, "train.ckpt.save_mode": "sync"})
uploading = changed(saving, {"train.ckpt.upload_s3": "final", "train.ckpt.s3_bucket": BUCKETS[0]})
watch(
    uploaded,
    uploading,
    {
        "train.ckpt.upload_s3": ("final", "all"),
        "train.ckpt.s3_bucket": BUCKETS,
        "train.ckpt.s3_prefix": ("outputs", "team/else"),
    },
)
watch(
    places_on_the_hub, saving, {"train.ckpt.upload_hf": (False, With(True, {"train.ckpt.hf_repo_name": "me/model"}))}
)
watch(
    places_on_the_hub,
    changed(saving, {"train.ckpt.upload_hf": True}),
    {"train.ckpt.hf_repo_name": ("me/model", "me/other")},
)


def decodes_alone(config: Config, place: Place) -> bool:
    """Whether the embedded engine decodes each request by itself."""
    return settings_of(config).alone


watch(decodes_alone, grpo, {"train.deterministic": (False, True)})
