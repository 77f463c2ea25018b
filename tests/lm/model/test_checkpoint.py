"""Checkpoints are whole, verified and executed by nobody."""

import dataclasses
import errno
import pickle

import pytest
import torch

import lm.machine.files
from kernels import Band
from lm.errors import WriteError
from lm.model.checkpoint import (
    CheckpointError,
    build_model,
    load_checkpoint,
    save_checkpoint,
    stage_of,
)
from lm.model.language_model import LanguageModel, ModelConfig, bands
from lm.schedule import Stage

CONFIG = ModelConfig(layers=2, heads=2, width=16, feedforward=32, dropout=0.1)
STAGE = Stage(2, 64, (3, 5), ((1, 2), (1, 3)), 1e-3, 4, 10, 1)


def content(**changed):
    model = LanguageModel(CONFIG, bands(STAGE))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.int32)).sum().backward()
    optimizer.step()
    return {
        "model": dataclasses.asdict(CONFIG),
        "stage": dataclasses.asdict(STAGE),
        "step": 3,
        "config": {"seed": 1, "data": {"name": "file", "fractions": [0.9, 0.05, 0.05]}},
        "data": {"name": "file", "sha256": {"train": "00"}},
        "bpc": None,
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "counters": {"bad_steps": 0, "nats": float("nan")},
        "scaler": None,
        **changed,
    }


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_what_is_saved_comes_back(tmp_path):
    saved = content()
    save_checkpoint(tmp_path / "a.ckpt", saved)
    found = load_checkpoint(tmp_path / "a.ckpt")
    assert found.pop("format") == 1
    assert found.keys() == saved.keys()
    pairs = list(zip(leaves(saved), leaves(found), strict=True))
    assert any(isinstance(a, torch.Tensor) for a, _ in pairs)
    for a, b in pairs:
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else str(a) == str(b)
        assert same, (a, b)
    assert stage_of(found) == STAGE
    model = build_model(found)
    assert not model.training
    assert [block.attention.band for block in model.blocks] == [Band(3, (1, 2)), Band(5, (1, 3))]
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved["weights"][name])


def test_a_model_of_another_shape_is_refused(tmp_path):
    save_checkpoint(tmp_path / "a.ckpt", content())
    found = load_checkpoint(tmp_path / "a.ckpt")
    found["model"]["width"] = 32
    with pytest.raises(CheckpointError, match="do not fit the model: content_bias"):
        build_model(found)
    found = load_checkpoint(tmp_path / "a.ckpt")
    found["weights"]["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="do not fit the model: extra"):
        build_model(found)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path, kept):
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, content())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(CheckpointError, match=r"a\.ckpt: truncated, damaged or not a checkpoint"):
        load_checkpoint(path)


def test_any_flipped_bit_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, content())
    whole = path.read_bytes()
    sound = [str(leaf) for leaf in leaves(load_checkpoint(path))]
    noticed = 0
    for position in range(7, len(whole), len(whole) // 60):
        broken = bytearray(whole)
        broken[position] ^= 0x10
        path.write_bytes(broken)
        try:
            found = load_checkpoint(path)
        except CheckpointError as error:
            noticed += str(path) in str(error)
        else:
            assert [str(leaf) for leaf in leaves(found)] == sound, position
    assert noticed > 20


class Harmful:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_nothing_in_a_checkpoint_is_executed(tmp_path, protocol):
    path = tmp_path / "a.ckpt"
    if protocol == "torch":
        torch.save({"format": 1, "x": Harmful()}, path)
    else:
        path.write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(CheckpointError, match="truncated, damaged or not a checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "not a checkpoint of this project"),
        ({"weights": {}}, "not a checkpoint of this project"),
        ({"format": 99}, "checkpoint format 99, this version reads 1"),
        ({"format": 1, "step": 2}, "not a whole checkpoint, it lacks model"),
    ],
)
def test_other_files_of_torch_are_refused(tmp_path, value, message):
    torch.save(value, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "a.ckpt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint file"):
        load_checkpoint(tmp_path / "none.ckpt")


def test_a_save_that_fails_is_loud_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, content(step=1))

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lm.machine.files.os, "fsync", full)
    with pytest.raises(WriteError, match=r"a\.ckpt: cannot be written \(No space left on device\)"):
        save_checkpoint(path, content(step=2))
    assert load_checkpoint(path)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_the_one_before_is_kept(tmp_path):
    path, before = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    for step in (1, 2, 3):
        save_checkpoint(path, content(step=step), keep=before)
    assert load_checkpoint(path)["step"] == 3
    assert load_checkpoint(before)["step"] == 2
