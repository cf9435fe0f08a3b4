"""`merge`, `export` and `import` from the shell: what they write, what they refuse, that nothing is written
over.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dflash_lab import cli
from dflash_lab.data.samples import Sample, read_provenance, read_samples, write_samples
from dflash_lab.drafter.checkpoint import load_checkpoint, save_checkpoint
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.model import Drafter

MADE = {"tokenizer_hash": "t", "template_hash": "m", "thinking": False}


def samples(path, numbers, *, fraction=0.5, **made):
    rows = [Sample(f"f:{n}", np.asarray([n, 2, 3]), np.asarray([0, 1, 1]), "f") for n in numbers]
    write_samples(path, rows, heldout_fraction=fraction, provenance={**MADE, **made})
    return str(path)


@pytest.fixture
def drafter(tmp_path):
    config = DrafterConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=4,
        mask_token_id=3,
        tap_ids=(0, 2),
        num_target_layers=4,
    )
    made = Drafter(config).initialize(torch.Generator().manual_seed(0))
    save_checkpoint(tmp_path / "drafter", made)
    return made


def test_merge_stores_each_sample_once_and_keeps_the_split(tmp_path, capsys):
    first = samples(tmp_path / "a.parquet", range(20))
    second = samples(tmp_path / "b.parquet", range(10, 30))
    goal = tmp_path / "new" / "all.parquet"
    assert cli.main(["merge", str(goal), first, second]) == 0
    assert "30 samples" in (told := capsys.readouterr().out) and "(10 of 40 were there twice)" in told
    split = dict(read_samples(goal).select("content_hash", "split").iter_rows())
    for path in (first, second):
        assert all(
            split[key] == side for key, side in read_samples(path).select("content_hash", "split").iter_rows()
        )
    assert read_provenance(goal)["heldout_fraction"] == 0.5 and read_provenance(goal)["tokenizer_hash"] == "t"
    before = goal.read_bytes()
    assert cli.main(["merge", str(goal), first]) == 1
    assert "exists already" in capsys.readouterr().err and goal.read_bytes() == before


def test_merge_refuses_what_does_not_belong_together(tmp_path, capsys):
    first = samples(tmp_path / "a.parquet", range(4))
    other = samples(tmp_path / "b.parquet", range(4), tokenizer_hash="another")
    share = samples(tmp_path / "c.parquet", range(4), fraction=0.1)
    goal = str(tmp_path / "all.parquet")
    assert cli.main(["merge", goal, first, other]) == 1
    assert "differ in tokenizer_hash" in capsys.readouterr().err
    assert cli.main(["merge", goal, first, share]) == 1
    assert "--heldout-fraction" in capsys.readouterr().err
    assert cli.main(["merge", goal, first, share, "--heldout-fraction", "0.3"]) == 0
    assert read_provenance(goal)["heldout_fraction"] == 0.3
    assert cli.main(["merge", str(tmp_path / "all2.parquet"), first, "--heldout-fraction", "7"]) == 1
    assert cli.main(["merge", str(tmp_path / "all2.parquet"), str(tmp_path / "none.parquet")]) == 1
    assert "none.json is missing" in capsys.readouterr().err and not (tmp_path / "all2.parquet").exists()


def test_a_drafter_goes_out_and_comes_back_equal(tmp_path, drafter, capsys):
    out, back = tmp_path / "speculators", tmp_path / "back"
    words = ["export", str(tmp_path / "drafter"), str(out), "--target", "me/target"]
    assert cli.main([*words, "--architecture", "LlamaForCausalLM"]) == 0
    written = json.loads((out / "config.json").read_text())
    verifier = written["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "me/target", "architectures": ["LlamaForCausalLM"]}
    assert written["aux_hidden_state_layer_ids"] == [1, 3]
    assert cli.main(["import", str(out), str(back)]) == 0
    again = load_checkpoint(back)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert capsys.readouterr().out.count("parameters") == 2
    assert cli.main(words) == 1 and cli.main(["import", str(out), str(back)]) == 1
    assert capsys.readouterr().err.count("exists already") == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"speculators_model_type": "dflash"}', '{"a": ' * 3000])
def test_import_of_something_else_is_an_input_error_that_names_it(tmp_path, text, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(text)
    assert cli.main(["import", str(tmp_path / "other"), str(tmp_path / "goal")]) == 1
    assert "config.json:" in capsys.readouterr().err
    assert not (tmp_path / "goal").exists()


def test_import_of_our_own_layout_says_that_none_is_needed(tmp_path, drafter, capsys):
    assert cli.main(["import", str(tmp_path / "drafter"), str(tmp_path / "goal")]) == 1
    assert "no import is needed" in capsys.readouterr().err and not (tmp_path / "goal").exists()


def test_the_depth_of_a_strangers_target_is_asked_for(tmp_path, drafter, capsys):
    cli.main(["export", str(tmp_path / "drafter"), str(tmp_path / "out"), "--target", "t"])
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    del values["num_target_layers"]
    path.write_text(json.dumps(values))
    assert cli.main(["import", str(tmp_path / "out"), str(tmp_path / "in")]) == 1
    assert "--layers" in capsys.readouterr().err
    assert cli.main(["import", str(tmp_path / "out"), str(tmp_path / "in"), "--layers", "4"]) == 0


@pytest.mark.parametrize("command", ["merge", "export", "import"])
def test_help_says_what_each_word_is(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0 and "to write" in capsys.readouterr().out


def test_merge_never_takes_the_place_of_what_lies_beside(tmp_path, capsys):
    """The provenance of all.parquet is all.json: neither name may be in use, and they must differ."""
    first = samples(tmp_path / "a.parquet", range(5))
    assert cli.main(["merge", str(tmp_path / "all.json"), first]) == 1
    assert "end in .parquet" in capsys.readouterr().err
    (tmp_path / "all.json").write_text("mine")
    assert cli.main(["merge", str(tmp_path / "all.parquet"), first]) == 1
    told = capsys.readouterr().err
    assert "all.json: exists already" in told
    assert told.endswith(f"mv {tmp_path}/all.json {tmp_path}/all.json.old\n")
    assert (tmp_path / "all.json").read_text() == "mine" and not (tmp_path / "all.parquet").exists()
    for share in ("nan", "-3", "1"):
        assert cli.main(["merge", str(tmp_path / "new.parquet"), first, "--heldout-fraction", share]) == 1
        assert "give a share from 0" in capsys.readouterr().err
    assert not (tmp_path / "new.parquet").exists()


def test_import_names_the_file_that_is_wrong(tmp_path, drafter, capsys):
    assert cli.main(["export", str(tmp_path / "drafter"), str(tmp_path / "out"), "--target", ""]) == 1
    assert "--target is empty" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "drafter"), str(tmp_path / "out"), "--target", "a/b"]) == 0
    whole = json.loads((tmp_path / "out" / "config.json").read_text())
    for name, value in (("block_size", "q"), ("num_target_layers", "many"), ("transformer_layer_config", 3)):
        (tmp_path / "out" / "config.json").write_text(json.dumps({**whole, name: value}))
        assert cli.main(["import", str(tmp_path / "out"), str(tmp_path / "in")]) == 1
        told = capsys.readouterr().err
        assert f"{tmp_path}/out/config.json: {name!r} is {json.dumps(value)}; it must be" in told
    (tmp_path / "out" / "config.json").write_text(json.dumps(whole))
    (tmp_path / "out" / "model.safetensors").unlink()
    assert cli.main(["import", str(tmp_path / "out"), str(tmp_path / "in")]) == 1
    assert "no weights at" in capsys.readouterr().err and not (tmp_path / "in").exists()
    config = tmp_path / "drafter" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": "wide"}))
    assert cli.main(["export", str(tmp_path / "drafter"), str(tmp_path / "o2"), "--target", "a/b"]) == 1
    assert f"{config}: 'hidden_size' is \"wide\"; it must be a whole number" in capsys.readouterr().err
