"""`merge`, `export`, `import` from the shell: what they write and refuse, that nothing is written over."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.wording import check_wording

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
        vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=8, block_size=4, mask_token_id=3, tap_ids=(0, 2), num_target_layers=4,
    )  # fmt: skip
    made = Drafter(config).initialize(torch.Generator().manual_seed(0))
    save_checkpoint(tmp_path / "drafter", made)
    return made


@pytest.fixture
def refuses(capsys):
    """Return a function that runs a command and holds what it says as it fails against the recorded words."""

    def refuses(*words) -> None:
        capsys.readouterr()
        assert cli.main([str(word) for word in words]) == 1
        check_wording(capsys.readouterr().err)

    return refuses


def test_merge_stores_each_sample_once_and_keeps_the_split(tmp_path, refuses, capsys):
    first = samples(tmp_path / "a.parquet", range(20))
    second = samples(tmp_path / "b.parquet", range(10, 30))
    goal = tmp_path / "new" / "all.parquet"
    assert cli.main(["merge", str(goal), first, second]) == 0
    check_wording(capsys.readouterr().out)
    split = dict(read_samples(goal).select("content_hash", "split").iter_rows())
    for path in (first, second):
        found = dict(read_samples(path).select("content_hash", "split").iter_rows())
        assert found.items() <= split.items()
    assert read_provenance(goal)["heldout_fraction"] == 0.5 and read_provenance(goal)["tokenizer_hash"] == "t"
    before = goal.read_bytes()
    refuses("merge", goal, first)
    assert goal.read_bytes() == before


def test_merge_refuses_what_does_not_belong_together(tmp_path, refuses):
    first = samples(tmp_path / "a.parquet", range(4))
    other = samples(tmp_path / "b.parquet", range(4), tokenizer_hash="another")
    share = samples(tmp_path / "c.parquet", range(4), fraction=0.1)
    goal = tmp_path / "all.parquet"
    refuses("merge", goal, first, other)
    refuses("merge", goal, first, share)
    refuses("merge", goal, tmp_path / "none.parquet")
    for fraction in ("7", "nan", "-3", "1"):
        refuses("merge", goal, first, "--heldout-fraction", fraction)
    assert not goal.exists()
    assert cli.main(["merge", str(goal), first, share, "--heldout-fraction", "0.3"]) == 0
    assert read_provenance(goal)["heldout_fraction"] == 0.3


def test_merge_never_takes_the_place_of_what_lies_beside(tmp_path, refuses):
    """The provenance of all.parquet is all.json: neither name may be in use, and they must differ."""
    first, beside = samples(tmp_path / "a.parquet", range(5)), tmp_path / "all.json"
    refuses("merge", beside, first)
    beside.write_text("mine")
    refuses("merge", tmp_path / "all.parquet", first)
    assert beside.read_text() == "mine" and not (tmp_path / "all.parquet").exists()


def test_a_drafter_goes_out_and_comes_back_equal(tmp_path, drafter, refuses, capsys):
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
    check_wording(capsys.readouterr().out)
    refuses(*words)
    refuses("import", out, back)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"speculators_model_type": "dflash"}', '{"a": ' * 3000],
    ids=["empty", "object", "list", "type-alone", "deep"],
)
def test_import_of_something_else_is_an_input_error_that_names_it(tmp_path, text, refuses):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(text)
    refuses("import", tmp_path / "other", tmp_path / "goal")
    assert not (tmp_path / "goal").exists()


def test_import_and_export_name_what_is_wrong(tmp_path, drafter, refuses):
    ours, out, goal = tmp_path / "drafter", tmp_path / "out", tmp_path / "goal"
    refuses("import", ours, goal)  # the layout is ours already
    refuses("export", ours, out, "--target", "")
    assert cli.main(["export", str(ours), str(out), "--target", "a/b"]) == 0
    path = out / "config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "block_size": "q"}))
    refuses("import", out, goal)
    path.write_text(json.dumps({name: whole[name] for name in whole if name != "num_target_layers"}))
    refuses("import", out, goal)
    assert not goal.exists()
    assert cli.main(["import", str(out), str(goal), "--layers", "4"]) == 0
    (out / "model.safetensors").unlink()
    refuses("import", out, tmp_path / "in", "--layers", "4")
    config = ours / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": "wide"}))
    refuses("export", ours, tmp_path / "o2", "--target", "a/b")
