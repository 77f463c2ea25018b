"""Small models, texts and runs for the tests of evaluation, sampling and compression."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from data.corpus import open_corpus
from kernels import Band
from lm.config.schema import DataConfig
from lm.measuring.bpc import character_nats
from lm.model.checkpoint import save_checkpoint
from lm.model.language_model import LanguageModel, ModelConfig, bands
from lm.schedule import Stage

STAGE = Stage(
    number=1,
    sequence=64,
    windows=(3, 4, 5),
    strides=((1, 1), (1, 2), (2, 4)),
    lr=1e-3,
    batch=4,
    steps=10,
    warmup=1,
)
FIELD = 3 + 8 + 20


def config(**changes: object) -> ModelConfig:
    values = {"layers": 3, "heads": 2, "width": 16, "feedforward": 32, "dropout": 0.3}
    # Large weights: what a character far away changes has to show in the losses.
    values |= {"init_std": 0.5, "backend": "dense"}
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


def tiny_model(stage: Stage = STAGE, seed: int = 0, **changes: object) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(config(**changes), bands(stage)).eval()


def unigram_model(bits: Mapping[int, float]) -> LanguageModel:
    """A model that predicts a byte with 2^-bits, whatever came before; the rest is shared."""
    model = LanguageModel(config(layers=1, tie_embedding=False), [Band(5, (1, 2))]).eval()
    left = (1 - sum(2.0**-b for b in bits.values())) / (256 - len(bits))
    probabilities = torch.full((256,), left, dtype=torch.float64)
    for byte, count in bits.items():
        probabilities[byte] = 2.0**-count
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(probabilities.log())
    return model


def uniform_model() -> LanguageModel:
    return unigram_model({0: 8.0})


def random_text(size: int, seed: int = 0) -> np.ndarray:
    """Bytes with some order in them: few values, newlines among them."""
    values = np.frombuffer(b"abcdefgh <>\n", np.uint8)
    return np.random.default_rng(seed).choice(values, size)


def tokens_of(text: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(text.astype(np.int64))[None]


@torch.inference_mode()
def losses_of(model: LanguageModel, text: np.ndarray) -> np.ndarray:
    """-ln p of each byte of the text but the first, by one forward pass over all of it."""
    tokens = tokens_of(text)
    return character_nats(model(tokens[:, :-1])[0], tokens[0, 1:]).numpy()


def exact_model(stage: Stage = STAGE, **changes: object) -> LanguageModel:
    """A model that computes in float64, so that only mistakes show; its logits are float32."""
    return tiny_model(stage, **changes).double()


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the rounding of float32 results."""
    torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=1e-6)


def save_run(
    root: Path,
    model: LanguageModel,
    text: np.ndarray,
    *,
    name: str = "x",
    stage: Stage = STAGE,
    finished: bool = True,
) -> Path:
    """A run of one stage on a file; returns its best checkpoint."""
    root.mkdir(exist_ok=True)
    path = root / f"{name}.txt"
    path.write_bytes(text.tobytes())
    corpus = open_corpus("file", root, path=path)
    data = dataclasses.asdict(DataConfig(name="file", path=str(path)))
    step = stage.steps if finished else stage.steps - 1
    folder = root / "runs" / name / f"stage{stage.number}"
    save_checkpoint(
        folder / "checkpoints" / "best.ckpt",
        {
            "model": dataclasses.asdict(model.config),
            "stage": dataclasses.asdict(stage),
            "step": step,
            "config": {"name": name, "data": data},
            "data": {
                "name": "file",
                "sha256": {k: split.sha256 for k, split in corpus.splits.items()},
            },
            "bpc": 5.0,
            "weights": model.state_dict(),
            "optimizer": None,
            "counters": {},
            "scaler": None,
        },
    )
    state = {"step": step, "steps": stage.steps, "finished": finished, "best_bpc": 5.0}
    (folder / "state.json").write_text(json.dumps(state))
    return folder / "checkpoints" / "best.ckpt"
