"""Backends written in torch alone: `loop` (exact, slow) and `chunks` (fast without TVM)."""
