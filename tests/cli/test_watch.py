"""`assay watch` on a small model that is on disk, in a subprocess; nothing is downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from assay.cli.app import app
from assay.results.lines import all_records
from assay.results.watch_record import WATCH
from tests.cli.test_cli import assay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "gold": 1, "is": 2, "pure": 3, "?": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="?")
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_prompt_is_read_and_every_layer_compared(model: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = assay(
        "watch", "--model", model, "--prompt", "gold is pure", "--prompt", "gold is gold is gold", "--out", str(out)
    )
    assert done.returncode == 0, done.stderr
    assert "model.layers.0.self_attn" in done.stdout
    assert "model.layers.1.self_attn" in done.stdout
    rows = all_records(out, WATCH)
    assert {(row["format"], row["batch"], row["queries"]) for row in rows} == {("bf16", 2, 5)}
    assert {row["head"] for row in rows} == {0, 1, 2, 3, None}
    assert set(load_file(out / "worst.safetensors")) == {"q", "k", "v", "bias"}  # one prompt is padded
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "Watched models" in page
    assert "The paper&#x27;s claims" not in page
    assert "LlamaForCausalLM" in page
    assert "## Watched models" in (out / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--dtype", "fp7"), "--dtype is one of fp32, bf16, fp16; got fp7."),
        (("--attention", "flash_attention_3"), "--attention flash_attention_3 cannot be had here: FlashAttention3"),
        (("--prompt", "gold " * 65), "--prompt must be at most 64 tokens long"),
        (("--device", "cuda:9"), "has no device 'cuda:9'"),
        (("--model", "nosuch/model"), "no model was found at nosuch/model. Give its folder."),
        (("--model", "/no/such/folder"), "/no/such/folder is no folder."),
        (("--attention", "none such"), "none such"),
    ],
)
def test_bad_usage_exits_with_2(model: str, arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = assay("watch", "--model", model, "--prompt", "gold", "--out", str(tmp_path / "run"), *arguments)
    assert done.returncode == 2, done.stdout
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_version_that_is_not_supported(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    done = CliRunner().invoke(app, ["watch", "--model", model, "--prompt", "gold", "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "transformers must be of the range transformers>=5,<6, got 4.57.6" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()


def test_a_name_that_is_no_model_says_nothing_of_writing(model: str, tmp_path: Path) -> None:
    command = ["watch", "--model", "nosuch/model", "--prompt", "gold", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "writable" not in done.stderr


def test_an_encoder_decoder_is_refused_by_name(model: str, tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    folder = tmp_path / "t5"
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    command = ["watch", "--model", str(folder), "--prompt", "gold", "--attention", "eager"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2, done.output
    assert "t5 is an encoder-decoder (t5), which reads a prompt and an answer." in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


def test_a_model_without_attention(model: str, tmp_path: Path) -> None:
    """It is refused, with what was looked for."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, state_size=4)
    folder = tmp_path / "mamba"
    transformers.MambaForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    command = ["watch", "--model", str(folder), "--prompt", "gold", "--attention", "eager", "--dtype", "fp32"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2, done.output
    assert "No attention was found in MambaForCausalLM" in " ".join(done.stderr.split())


def test_weights_that_are_none(model: str, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    done = assay("watch", "--model", str(broken), "--prompt", "gold", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "--model must have whole weights" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


def test_a_prompt_without_words(model: str, tmp_path: Path) -> None:
    done = assay("watch", "--model", model, "--prompt", "", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "--prompt must have a word in it" in " ".join(done.stderr.split())


def test_a_file_where_the_folder_would_be(model: str, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    done = assay("watch", "--model", model, "--prompt", "gold", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "The results need a folder that can be written to" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run").read_text() == "mine"
