from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lm.config.quoting import literal

PARSER = OverridesParser.create()
SIGNS = "\\\"'${}a ,()[]=:\n\t#%~@é\udc80."


@settings(max_examples=300)
@given(st.one_of(st.text(alphabet=SIGNS), st.text()))
@example("\\${a}")
@example('\\"')
@example("\\")
@example("def f(x, y={}): return \"a\" + f'{x}'")
def test_any_value_arrives_as_it_was_typed(value: str) -> None:
    (argument,) = literal([f"prompt={value}"], {"prompt"})
    config = OmegaConf.create({"prompt": ""})
    OmegaConf.update(config, "prompt", PARSER.parse_override(argument).value())
    assert config.prompt == value


def test_other_arguments_stay() -> None:
    arguments = ["run=x", "+a=prompt=b", "--cfg", "job", "prompt"]
    assert literal(arguments, {"prompt"}) == arguments
