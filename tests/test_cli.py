"""The m3attn command: demo on small texts, listings, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import m3attn
from m3attn.bench.report import aligned
from m3attn.bench.shapes import Heads
from m3attn.cli.main import main
from m3attn.demo import geometry, queries, text
from m3attn.demo.plot import chosen_blocks
from m3attn.demo.run import Options, choose_formats, choose_geometry, choose_implementation, steps

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU behaviour")


def words(value):
    """Test ids of arguments and messages."""
    return value if isinstance(value, str) else " ".join(value)


def demo(*arguments, tokens="80"):
    return main(["demo", "--impl", "reference", "--tokens", tokens, *map(str, arguments)])


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.txt"
    path.write_text("the brass key\nthe green card, the yellow card\n" * 6 + "what does the brass key open")
    return path


@NO_GPU
def test_demo_on_a_users_text(page, tmp_path, capsys):
    picture = tmp_path / "chosen.png"
    assert demo("--text", page, "--plot", picture) == 0
    out = capsys.readouterr().out
    for stage in ("qk_norm_rope_insert", "dense_attention", "index_topk", "sparse_attention"):
        assert stage in out
    assert "--impl reference" in out and "ids equal the reference's" in out and "weights are random" in out
    assert "blocks of 32, K = 8" in out and "estimated time" in out
    assert out.count("query at byte") == 3 and "the brass key" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@NO_GPU
def test_demo_on_one_byte(tmp_path, capsys):
    path = tmp_path / "one.txt"
    path.write_bytes(b"x")
    assert demo("--text", path) == 0
    out = capsys.readouterr().out
    assert "1 byte; 1 token, one a byte;" in out and "1 token prefilled" in out and "it sees its own block only" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty; the demo needs at least one byte"), (None, "there is no file")],
    ids=["empty", "missing"],
)
def test_demo_without_a_text_says_so(tmp_path, capsys, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert demo("--text", path) == 2
    captured = capsys.readouterr()
    assert message in captured.err and str(path) in captured.err and captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3/2"], "heads: expected Hq/Hkv"),
        (["--layers", "0"], "--layers: expected at least 1"),
        (["--tokens", "0"], "--tokens: expected 1"),
        (["--rule", "best"], "rule: expected one of topk"),
        (["--impl", "fastest"], "'fastest' is not a key"),
        (["--mode", "fp8", "--kv-cache-dtype", "fp8_e5m2"], "mode fp8 takes fp8_e4m3"),
        (["--mode", "bf16", "--kv-cache-dtype", "fp8_e4m3"], "mode bf16 takes bf16"),
        (["--plot", "/no/such/folder/x.png"], "there is no folder"),
        (["--plot", "x.docx"], "expected a .png"),
        (["--text", "/"], "cannot read"),
    ],
    ids=words,
)
def test_bad_options_of_the_demo(capsys, arguments, message):
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:kv_cache_dtype fp8_e5m2")
@NO_GPU
@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        (["--kv-cache-dtype", "fp8_e4m3"], "mode widen"),
        (["--kv-cache-dtype", "fp8_e5m2"], "mode widen"),
        (["--mode", "fp8"], "mode fp8,"),
        (["--mode", "fp8_pv"], "mode fp8_pv"),
    ],
    ids=words,
)
def test_demo_compares_fp8_with_bf16(page, capsys, arguments, mode):
    assert demo("--text", page, *arguments, tokens="300") == 0
    out = capsys.readouterr().out
    assert mode in out and "error to bf16 run" in out and "ids as in bf16 run" in out
    (line,) = [line for line in out.splitlines() if line.startswith("index_topk") and "prefill" in line]
    assert 30 < float(line.split()[-1].rstrip("%")) <= 100


@NO_GPU
@pytest.mark.parametrize("rule", ["shared_heads", "window"])
def test_demo_with_another_rule(page, capsys, rule):
    assert demo("--text", page, "--rule", rule, "--heads", "4/2", tokens="300") == 0
    out = capsys.readouterr().out
    assert f"rule {rule}" in out and "index_score" in out and "index_topk" not in out


@NO_GPU
def test_demo_of_one_layer_is_sparse(page, capsys):
    assert demo("--text", page, "--layers", "1") == 0
    out = capsys.readouterr().out
    assert "0 dense + 1 sparse" in out and "\ndense_attention" not in out


@NO_GPU
def test_demo_says_when_ids_are_wrong(page, capsys):
    reference = next(i for i in m3attn.implementations("index_topk") if i.key == "reference").load()

    def first_blocks(call):
        reference(call)
        call.out[:, :, 0] = torch.where(call.out[:, :, 0] > 0, 0, call.out[:, :, 0])

    m3attn.register("index_topk", "first_blocks", first_blocks)
    try:
        code = main(["demo", "--text", str(page), "--tokens", "306", "--impl", "reference,index_topk=first_blocks"])
    finally:
        m3attn.unregister("index_topk", "first_blocks")
    assert code == 1 and "NOT as the reference" in capsys.readouterr().out


@NO_GPU
def test_demo_runs_triton_in_the_interpreter_by_default(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "text.txt"
    path.write_text("to read is to choose what to read, and to choose is to have read")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("M3ATTN_", "TRITON_"))}
    command = [sys.executable, "-m", "m3attn", "demo", "--text", str(path), "--tokens", "40"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "Triton kernels run in Triton's interpreter" in done.stdout and "ids equal" in done.stdout
    assert " triton " in done.stdout


@NO_GPU
def test_demo_where_the_interpreter_does_not_run(page, capsys, monkeypatch):
    pytest.importorskip("triton")
    broken = m3attn.BrokenImplementation("the interpreter of Triton 3.6.0 does not run with numpy 2.4.6: install numpy<2.4")
    monkeypatch.setattr(m3attn.Implementation, "load", lambda self: (_ for _ in ()).throw(broken))
    assert choose_implementation(None, CPU) == (None, f"no GPU, so the reference runs: {broken}")
    assert main(["demo", "--text", str(page), "--impl", "triton"]) == 2
    assert "--impl triton: the interpreter of Triton" in capsys.readouterr().err


def test_the_shipped_text():
    content = text.load(None)
    assert len(content) >= geometry.ON_GPU.tokens and content.isascii()
    lines = [line for line in content.decode().splitlines() if line.strip()]
    assert len(set(lines)) == len(lines)


def test_readable_text():
    assert text.readable(b"a\n  b\tc\x00\xff") == "a b c.."
    assert text.line_at(b"one\ntwo words\nthree", 6) == "two"
    assert text.block_text(b"abcdefgh", 1, 3) == "def"


def test_geometry_fits_the_text():
    assert geometry.ON_CPU.fit(10_000).tokens == 1024
    assert (geometry.ON_CPU.fit(1).tokens, geometry.ON_CPU.fit(1).decode_steps) == (1, 0)
    short = geometry.ON_CPU.fit(20)
    assert (short.tokens, short.decode_steps) == (20, 5)
    assert list(steps(short)) == [(0, 15), *((t, t + 1) for t in range(15, 20))]
    assert geometry.ON_CPU.num_pages > geometry.ON_CPU.topk and geometry.ON_GPU.num_pages > geometry.ON_GPU.topk
    assert geometry.REAL.num_pages > geometry.REAL.topk


def test_sizes_by_machine():
    assert choose_geometry(Options(), CPU) == geometry.ON_CPU
    assert choose_geometry(Options(real_geometry=True), CPU) == geometry.REAL
    on_gpu = choose_geometry(Options(), torch.device("cuda", 0))
    assert on_gpu.heads == Heads(64, 4) and on_gpu.tokens == 32768 and on_gpu.block_size == 128
    layered = choose_geometry(Options(layers=5, heads=Heads(8, 1), tokens=64), CPU)
    assert (layered.dense_layers, layered.sparse_layers, layered.tokens, layered.heads) == (1, 4, 64, Heads(8, 1))
    assert geometry.estimate_seconds(geometry.REAL, interpreted=True) > 10 * geometry.estimate_seconds(geometry.REAL, interpreted=False)
    assert [geometry.duration(s) for s in (40, 600, 20_000)] == ["40 s", "10 min", "6 h"]


def test_modes_follow_from_the_cache():
    on_cpu = geometry.ON_CPU
    assert choose_formats(Options(), on_cpu, CPU).mode == "bf16"
    assert choose_formats(Options(kv_cache_dtype="fp8_e4m3"), on_cpu, CPU).mode == "widen"
    assert choose_formats(Options(mode="fp8"), on_cpu, CPU).q == torch.float8_e4m3fn


def test_queries_stand_at_word_ends():
    content = b"one two three four five six seven"
    found = queries.positions(content, len(content))
    assert len(found) == 3 and found[-1] == len(content) - 1
    assert all(content[p : p + 1].isalnum() and (p + 1 == len(content) or content[p + 1 : p + 2] == b" ") for p in found)
    assert queries.positions(b"x", 1) == [0]
    assert queries.positions(b"....", 4)


def test_picture_counts_choices():
    ids = torch.tensor([[[0, -1], [0, 1], [1, 2]]], dtype=torch.int32)
    assert chosen_blocks(ids, 3).tolist() == [[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]
    assert chosen_blocks(ids, 3, max_rows=2).tolist() == [[[1, 0.5, 0], [0, 1, 1]]]


def test_implementations_as_json(capsys):
    assert main(["implementations", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert all({"stage", "implementation", "archs"} <= entry.keys() for entry in listed)
    pairs = {(entry["stage"], entry["implementation"]) for entry in listed}
    for stage in (
        "qk_norm_rope_insert",
        "index_score",
        "select_blocks",
        "index_topk",
        "merge_attention_states",
        "sparse_attention",
        "dense_attention",
    ):
        assert {(stage, "reference"), (stage, "triton")} <= pairs


def test_implementations_as_a_table(capsys):
    assert main(["implementations", "sparse_attention"]) == 0
    out = capsys.readouterr().out
    assert "sparse_attention" in out and "sm_80+" in out and "index_topk" not in out
    assert main(["implementations", "nothing"]) == 2
    assert "stage: expected one of" in capsys.readouterr().err


def test_explain_mode(capsys, monkeypatch):
    assert main(["explain", "mode", "--kv-cache-dtype", "fp8", "--arch", "sm_90a", "sm_80"]) == 0
    hopper, ampere = capsys.readouterr().out.split("\nsm_80: ")
    assert "mode fp8" in hopper and "run fp8 attention on sm_90" in hopper and "index cache fp8_e4m3: follows mode fp8" in hopper
    monkeypatch.setenv("M3ATTN_DISABLE_FP8_ATTN_GEMM", "1")
    assert main(["explain", "mode", "--kv-cache-dtype", "fp8", "--arch", "sm_90a"]) == 0
    assert "mode widen: M3ATTN_DISABLE_FP8_ATTN_GEMM=1" in capsys.readouterr().out
    assert "no implementation declares fp8 attention for sm_80" in ampere
    assert main(["explain", "mode", "--kv-cache-dtype", "fp7"]) == 2
    assert "kv_cache_dtype: expected one of" in capsys.readouterr().err


def test_explain(capsys):
    assert main(["explain", "sparse_attention", "--arch", "sm_90a", "sm_75", "--kv-dtype", "fp8", "--phase", "decode"]) == 0
    out = capsys.readouterr().out
    assert "sm_90 (decode, widen): " in out and "sm_75 (decode, widen): reference" in out and "needs sm_80 or newer" in out
    assert main(["explain", "index_topk", "--heads", "16/1", "--rule", "window", "--arch", "cpu"]) == 0
    assert "the fused stage is not used" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "stage: expected one of"),
        (["index_topk", "--arch", "hopper"], "arch: expected"),
        (["index_topk", "--index-dtype", "int4"], "--index-dtype: expected one of"),
        (["index_topk", "--heads", "5/2"], "heads: expected"),
    ],
    ids=words,
)
def test_explain_of_bad_input(capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_info(capsys, monkeypatch):
    assert main(["info"]) == 0
    assert f"torch: {torch.__version__}" in capsys.readouterr().out
    monkeypatch.setattr(m3attn, "info", lambda: {"plugins": {"mine": None, "theirs": "ImportError: no"}})
    assert main(["info"]) == 0
    assert capsys.readouterr().out.splitlines() == ["plugins:", "  mine: ok", "  theirs: ImportError: no"]
    monkeypatch.undo()
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["m3attn"] == m3attn.__version__


@NO_GPU
def test_bench_wants_a_gpu(capsys):
    assert main(["bench", "sparse_attention", "--shapes", "P1"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "stage: expected one of"),
        (["index_topk", "--shapes", "P9"], "shape: expected one of P1"),
        (["index_topk", "--mode", "int8"], "mode: expected one of bf16"),
        (["index_topk", "--mode", "widen"], "nothing to time"),
        (["index_topk", "--heads", "64"], "heads: expected"),
        (["index_topk", "--impl", "fastest"], "'fastest' is not a key"),
    ],
    ids=words,
)
def test_bench_of_bad_input(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_version_and_no_command(capsys):
    for arguments, code in ((["--version"], 0), ([], 2), (["dance"], 2)):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == code
    assert m3attn.__version__ in capsys.readouterr().out


def test_an_unknown_option_shows_the_commands_own_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["report", "--out", "x.html"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "usage: m3attn report" in message and "OUT.html" in message and "m3attn report: error: unrecognized arguments: --out" in message


def test_the_demo_names_the_option_that_chose(page, capsys):
    assert main(["demo", "--text", str(page), "--tokens", "40", "--impl", "sparse_attention=cute_sm90"]) == 2
    message = capsys.readouterr().err
    assert "'cute_sm90' (--impl sparse_attention=cute_sm90) cannot run this" in message and "use(" not in message


def warmup_without_cute(*arguments):
    """What `m3attn warmup` says to stderr where the CuTe DSL is not installed."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['cutlass', 'tvm_ffi', 'cuda'])); "
        f"from m3attn.cli.main import main; sys.exit(main(['warmup', *{arguments!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def test_warmup_without_its_package():
    assert "pip install 'm3attn[cute]', in a checkout pip install '.[cute]'" in warmup_without_cute("--arch", "sm_90a")
    assert "there are no CuTe DSL kernels for sm_80, only for sm_90, sm_100" in warmup_without_cute("--arch", "sm_80", "--list")


def test_tables_are_aligned():
    assert aligned(("a", "bb"), [("ccc", "d")]) == "a    bb\nccc  d"
