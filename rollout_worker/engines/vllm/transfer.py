"""Inside of vLLM's worker processes: the weight-transfer engine that reads versions from our store.

    start_weight_update ─▶ update_weights(root, publication) ─▶ finish_weight_update ─▶ last_update()

Weights are copied into the parameters where they lie, so graphs and tied layers keep seeing them. That is
right only where a parameter is what its layer computes with; `unsupported` names layers that compute from
something derived of it (quantised, repacked), which this build does not update.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from rollout_worker.engines.vllm.proof import LoadTrace, ProofReport
from schema.wire.weights import Publication
from weight_sync import WeightError, fetch

PATIENCE = 1.0
"""Seconds: the worker has fetched this version just now, only another host may see it later."""
_PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Ways of vLLM's layers to compute that use the parameter itself."""


@dataclass
class StoreInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every update says where it lies."""


@dataclass
class StoreUpdateInfo(WeightTransferUpdateInfo):
    """One version: root of a directory store, and the publication as JSON."""

    root: str
    publication: str


class StoreWeightTransferEngine(WeightTransferEngine[StoreInitInfo, StoreUpdateInfo]):
    """Loads verified versions from a directory store into a vLLM model, and proves that they arrived."""

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo
    supports_draft_weight_update = False

    _proof = ProofReport(["no version was loaded yet"], {}, {})
    _apply_s = _verify_s = 0.0
    _unreadable = False

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        self._proof = ProofReport(["the update was not finished"], {}, {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one version; what went wrong stands in `last_update`, so that the update always ends in order.

        Replaces the base class's method, which waits for an accelerator that a CPU does not have.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StoreUpdateInfo) -> None:
        trace = LoadTrace(self.model)
        self._unreadable = False
        started = time.monotonic()
        try:
            publication = Publication.model_validate_json(update_info.publication)
            weights = fetch(update_info.root, publication, patience=PATIENCE)
            with disable_mtp_completeness_check(), torch.no_grad(), trace:
                self.model.load_weights(trace.given(weights.tensors()))
        except (WeightError, ValidationError) as error:
            self._unreadable = True
            self._proof = ProofReport([str(error)], {}, {})
        except (
            Exception
        ) as error:  # vLLM's loaders raise whatever they like, for unknown names and wrong shapes
            cause = f"{type(error).__name__}: {error}".rstrip(": ")[:300]
            self._proof = ProofReport([f"{trace.current} cannot be loaded ({cause})"], {}, {})
        else:
            loaded = time.monotonic()
            self._proof = trace.report()
            self._apply_s, self._verify_s = loaded - started, time.monotonic() - loaded

    def finish_weight_update(self) -> None:
        """Nothing is left to do: `load_weights` has written the parameters in place."""

    def last_update(self) -> dict[str, Any]:
        """What the last update found, and its seconds (reading and hashing the files is part of applying)."""
        return {
            "proof": self._proof.to_dict(),
            "unreadable": self._unreadable,
            "apply_s": self._apply_s,
            "verify_s": self._verify_s,
        }

    def unsupported(self) -> list[str]:
        """Layers that compute from something other than their parameters."""
        found = []
        for name, module in self.model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is not None and type(method).__name__ not in _PLAIN:
                found.append(f"{name} ({type(method).__name__})")
            elif type(module).__name__ == "MLAAttention":
                found.append(f"{name} (MLAAttention)")
        return found

    def shutdown(self) -> None:
        """Nothing is held between updates."""


class WorkerExtension:
    """Methods that vLLM adds to its worker class, to be called by `collective_rpc`."""

    weight_transfer_engine: StoreWeightTransferEngine

    def cosmos_last_update(self) -> dict[str, Any]:
        return self.weight_transfer_engine.last_update()

    def cosmos_unsupported_layers(self) -> list[str]:
        return self.weight_transfer_engine.unsupported()
