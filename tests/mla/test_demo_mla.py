"""`m3attn demo --mla`: both runs, their tables and verdict, small texts, bad options."""

import pytest

from m3attn.cli.main import main
from m3attn.demo.mla import ON_CPU, ON_GPU, REAL
from m3attn.demo.text import counted
from m3attn.testing.matrix import DEVICE


def demo(*arguments: object, tokens: int = 80) -> int:
    return main(["demo", "--mla", "--impl", "reference", "--tokens", str(tokens), *map(str, arguments)])


def test_it_runs_in_bf16_and_fp8(capsys: pytest.CaptureFixture) -> None:
    tokens = 80 if DEVICE == "cpu" else 2_200  # more than one chunk of the prefill
    assert demo(tokens=tokens) == 0
    shown = capsys.readouterr().out
    for stage in ("prepare_prefill_qkv", "mla_prefill", "merge_attention_states", "sparse_mla_prefill"):
        assert shown.count(f"\n{stage} ") == 2, shown
    assert "quantize_fp8" in shown and "error to bf16 run" in shown and "reference, by use(...)" in shown
    assert "errors against the reference are inside their bounds" in shown and f"query {tokens - 1}" in shown


@pytest.mark.parametrize("content", [b"x", b"abc" * 20, bytes(range(256))])
def test_on_a_users_text(content: bytes, tmp_path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert demo("--text", path, tokens=70) == 0
    assert f"{counted(len(content), 'byte')}; {counted(min(70, len(content)), 'token')}, one a byte" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rule", "window"), "--rule: expected nothing with --mla, got window"),
        (("--heads", "4/2"), "--heads: expected nothing with --mla"),
        (("--kv-cache-dtype", "fp8_e4m3"), "--kv-cache-dtype: expected nothing with --mla"),
        (("--text", "/nowhere/at/all"), "there is no file"),
        (("--tokens", "0"), "--tokens: expected 1 to"),
        (("--impl", "nope"), "'nope' is not a key"),
    ],
)
def test_bad_options(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture) -> None:
    assert demo(*arguments) == 2
    assert message in capsys.readouterr().err


def test_geometries_have_the_dims_of_deepseek_v3() -> None:
    assert "keys of 128 + 64, values of 128, latent 512" in str(REAL) and ON_GPU.heads == REAL.heads == 128 and ON_CPU.topk < ON_CPU.tokens
