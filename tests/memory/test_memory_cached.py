"""Counts on disk: read back as they were, counted again when the file holds none."""

import pytest

from dflash_lab.memory import fake
from dflash_lab.memory.account import Account
from dflash_lab.memory.cached import fake_extraction
from dflash_lab.memory.setups import ExtractionSetup
from dflash_lab.target.shapes import shape_config

CONFIG = shape_config("smollm2-135m")
SETUP = ExtractionSetup(batch=1, length=8, tap_ids=(1,))


@pytest.fixture
def counts(monkeypatch):
    """The setups that were counted, each as an account of ever more bytes."""
    done = []

    def count(config, setup):
        done.append(setup)
        return Account("fake", "x", {"MLP": len(done)}, {"MLP": "N"}, "layer 1", ("a note",)), None

    monkeypatch.setattr(fake, "count_extraction", count)
    return done


def test_a_count_is_made_once_and_read_back_equal(tmp_path, counts):
    first = fake_extraction(CONFIG, SETUP, folder=tmp_path)
    assert fake_extraction(CONFIG, SETUP, folder=tmp_path) == first and len(counts) == 1


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "1", '{"notes": [], "terms": 3}', '{"notes": 1}'])
def test_a_file_without_an_account_is_counted_again_and_told(tmp_path, counts, caplog, text):
    fake_extraction(CONFIG, SETUP, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert fake_extraction(CONFIG, SETUP, folder=tmp_path).terms == {"MLP": 2}
    assert f"{path}: counted again" in caplog.text
    assert fake_extraction(CONFIG, SETUP, folder=tmp_path).terms == {"MLP": 2} and len(counts) == 2
