from __future__ import annotations

import pytest
import torch

from kernels import Band
from lm.measuring.protocols import stream
from lm.model.language_model import LanguageModel, bands
from lm.model.stream import LayerCache, StreamState, first_positions, receptive_field
from tests.lm.evaluation_cases import (
    FIELD,
    STAGE,
    assert_same_logits,
    config,
    exact_model,
    losses_of,
    random_text,
    tokens_of,
)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 50, 1000])
def test_pieces_give_the_logits_of_one_forward_pass(chunk: int) -> None:
    model, tokens = exact_model(), tokens_of(random_text(101))
    with torch.inference_mode():
        expected = model(tokens)
    state = StreamState(model)
    pieces = [state.advance(piece) for piece in tokens.split(chunk, dim=1)]
    assert_same_logits(torch.cat(pieces, dim=1), expected)


@pytest.mark.parametrize("changes", [{"final_norm": False}, {"scale_embedding": False},
    {"tie_embedding": False, "output_bias": False}, {"share_position_biases": False},
    {"position_unit": "steps", "attention_bias": True}, {"backend": "chunks"}])  # fmt: skip
def test_every_kind_of_model_streams(changes: dict[str, object]) -> None:
    model, tokens = exact_model(**changes), tokens_of(random_text(60))
    with torch.inference_mode():
        expected = model(tokens)
    state = StreamState(model)
    pieces = [state.advance(piece) for piece in tokens.split([30, 1, 1, 28], dim=1)]
    assert_same_logits(torch.cat(pieces, dim=1), expected)


def test_several_texts_side_by_side() -> None:
    model = exact_model()
    tokens = torch.cat([tokens_of(random_text(50, seed)) for seed in range(3)])
    state = StreamState(model, batch=3)
    pieces = [state.advance(piece) for piece in tokens.split(9, dim=1)]
    with torch.inference_mode():
        assert_same_logits(torch.cat(pieces, dim=1), model(tokens))


def test_restart_forgets_the_text_and_may_change_the_batch() -> None:
    model, first, second = exact_model(), random_text(40, 1), random_text(40, 2)
    state = StreamState(model)
    state.advance(tokens_of(first))
    for batch in (1, 2, 1):
        state.restart(batch)
        found = state.advance(tokens_of(second).expand(batch, -1))
        with torch.inference_mode():
            expected = model(tokens_of(second)).expand(batch, -1, -1)
        assert_same_logits(found, expected)


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("first", [0, 1, FIELD, 70, 89])
def test_layers_skip_what_no_scored_position_sees(chunk: int, first: int) -> None:
    model, tokens = exact_model(), tokens_of(random_text(90))
    with torch.inference_mode():
        expected = model(tokens)[:, first:]
    state = StreamState(model)
    pieces = [state.advance(piece, first) for piece in tokens.split(chunk, dim=1)]
    assert_same_logits(torch.cat(pieces, dim=1), expected)


def test_skipping_saves_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    model = exact_model()
    for block in model.blocks:
        block.inner.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    StreamState(model).advance(tokens_of(random_text(90)), 85)
    assert seen == [5 + 8 + 20, 5 + 20, 5]


def test_first_positions_are_a_reach_apart() -> None:
    assert first_positions([3, 8, 20], 85) == [85 - 31, 85 - 28, 85 - 20, 85]
    assert first_positions([3, 8, 20], 22) == [0, 0, 2, 22]
    assert receptive_field(exact_model()) == FIELD == STAGE.receptive_field


@pytest.mark.parametrize("reach", [0, 1, 7, 20])
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_cache_returns_the_reach_and_stays_bounded(reach: int, chunk: int) -> None:
    cache = LayerCache(reach, torch.zeros(1, reach + 1, 2))
    positions = torch.arange(300.0).view(1, 300, 1, 1).expand(-1, -1, 1, 2)
    end = 0
    for piece in positions.split(chunk, dim=1):
        keys, values = cache.extend(piece, -piece)
        start, end = max(0, end - reach), end + piece.shape[1]
        assert keys[0, :, 0, 0].tolist() == list(range(start, end))
        torch.testing.assert_close(values, -keys)
        assert cache.capacity <= reach + max(reach, chunk)


def test_appending_is_amortised(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = 0
    make_room = LayerCache._make_room

    def counted(self: LayerCache, k: torch.Tensor, v: torch.Tensor) -> None:
        nonlocal moves
        moves += 1
        make_room(self, k, v)

    monkeypatch.setattr(LayerCache, "_make_room", counted)
    cache = LayerCache(64, torch.zeros(1, 65, 2))
    for _ in range(64 * 20):
        cache.extend(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    assert moves <= 20 + 8


def test_distances_are_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact_model()
    calls = []
    for block in model.blocks:
        block.attention.r.register_forward_hook(lambda *_: calls.append(0))
        original = block.attention.distance_keys
        monkeypatch.setattr(
            block.attention, "distance_keys", lambda *a, f=original: calls.append(0) or f(*a)
        )
    stream(model, random_text(200), chunk=7)
    assert len(calls) == len(model.blocks)


def test_windows_larger_than_the_text() -> None:
    model = LanguageModel(config(layers=1), [Band(500, (1, 3))]).eval()
    text = random_text(40)
    assert stream(model, text, chunk=6).nats == pytest.approx(losses_of(model, text).sum())


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.eval"):
        StreamState(LanguageModel(config(), bands(STAGE)))
    with pytest.raises(ValueError, match="has 2 rows, the state has 1"):
        StreamState(exact_model()).advance(torch.zeros(2, 3, dtype=torch.long))
