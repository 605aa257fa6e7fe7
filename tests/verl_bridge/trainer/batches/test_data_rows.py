# SPDX-License-Identifier: Apache-2.0
"""verl's own data set, with pictures of all kinds: what cannot be a prompt costs itself alone."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from recipe.async_pipeline.errors import BadDataError
from recipe.async_pipeline.lab.tasks.data import write_rows
from tests.conftest import Load

pytestmark = [pytest.mark.real_engine, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]
HUGE = 14_000
"""Height and width of a picture that Pillow refuses, as one that fills the memory."""


def file_of(width: int, height: int, mode: str = "RGB") -> bytes:
    written = io.BytesIO()
    Image.new(mode, (width, height)).save(written, "PNG")
    return written.getvalue()


ROWS = {
    "small": ([file_of(28, 28)], "<image>what?"),
    "two": ([file_of(56, 28), file_of(28, 84)], "<image><image>what?"),
    "none": ([], "what?"),
    "broken": ([b"no picture"], "<image>what?"),
    "cut off": ([file_of(56, 56)[:60]], "<image>what?"),
    "huge": ([file_of(HUGE, HUGE, "1")], "<image>what?"),
    "too few": ([file_of(28, 28)], "<image><image>what?"),
}
UNREADABLE = {
    "broken": "UnidentifiedImageError",
    "huge": "DecompressionBombError",
    "too few": "AssertionError",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each row, and one with all."""
    folder = tmp_path_factory.mktemp("rows")
    rows = {
        name: {
            "data_source": "look",
            "prompt": [{"role": "user", "content": question}],
            "images": [{"bytes": data, "path": None} for data in pictures],
            "reward_model": {"style": "rule", "ground_truth": name},
            "extra_info": {"index": number},
        }
        for number, (name, (pictures, question)) in enumerate(ROWS.items())
    }
    for name, row in rows.items():
        write_rows([row], folder / f"{name}.parquet")
    write_rows(list(rows.values()), folder / "all.parquet")
    return folder


@pytest.fixture
def dataset(load: Load, files: Path, tmp_path: Path) -> Any:
    """Return a function that returns verl's data set of a file."""
    from omegaconf import OmegaConf

    cls = load("verl.utils.dataset.rl_dataset").RLHFDataset
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(tmp_path)})
    return lambda name: cls(str(files / f"{name}.parquet"), None, config, processor=object())


@pytest.mark.parametrize("workers", [0, 1])
def test_each_row_that_is_no_prompt_says_why(
    module: ModuleType, load: Load, dataset: Any, workers: int
) -> None:
    """Also where the data loader reads in processes, which a picture that cannot be pickled would hang."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = dataset("all")
    module.keep_readable(data, training=True)
    collate = load("verl.utils.dataset.rl_dataset").collate_fn
    (batch,) = StatefulDataLoader(data, batch_size=len(ROWS), num_workers=workers, collate_fn=collate)
    names = [*ROWS]
    flaws = {name: flaw for name, flaw in zip(names, batch[module.FLAW], strict=True) if flaw}
    assert {name: flaw.split(": ")[1] for name, flaw in flaws.items()} == UNREADABLE
    assert flaws["broken"].startswith("row 3 of the data, counted from 0 after verl's filter: Unidentified")
    assert [*batch[module.ROW]] == [*range(len(ROWS))]
    for name, messages in zip(names, batch["raw_prompt"], strict=True):
        if name in flaws:
            continue
        parts = messages[0]["content"]
        pictures = [part for part in parts if part["type"] == "image"] if isinstance(parts, list) else []
        assert [one["bytes"] for one in pictures] == ROWS[name][0]
        assert all("image" not in one for one in pictures), "closed: a worker decodes them"


def test_validation_leaves_out_what_it_cannot_read(
    module: ModuleType, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    # Not `caplog`: packages that other tests load disable the loggers that exist by then.
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: warnings.append(text % values))
    data = dataset("all")
    module.keep_readable(data, training=False)
    rows = data.__getitems__([*range(len(ROWS))])
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["small", "two", "none"]
    assert [line.startswith("validation leaves out row ") for line in warnings] == [True] * 4
    assert any("row 4 of the data" in line for line in warnings)
    assert not {module.ROW, module.FLAW} & set(rows[0])
    (another,) = data.__getitems__([3])
    assert another["reward_model"]["ground_truth"] == "small", "a batch is not empty"


def test_a_batch_without_a_prompt_has_the_columns_of_others(module: ModuleType, dataset: Any) -> None:
    (row,) = module.read_rows(dataset("all"), [5], training=True)
    assert "DecompressionBombError" in row[module.FLAW]
    assert row["reward_model"]["ground_truth"] == "small"
    with pytest.raises(
        BadDataError, match="no row of the data can be made a prompt; row 0 .*UnidentifiedImage"
    ):
        module.read_rows(dataset("broken"), [0], training=True)


def test_a_data_set_that_reads_whole_batches_is_left_alone(module: ModuleType) -> None:
    class Own(list[int]):
        def __getitems__(self, numbers: list[int]) -> list[int]:
            return [self[number] for number in numbers]

    data = Own([1, 2])
    module.keep_readable(data, training=True)
    assert data.__getitems__([1, 0]) == [2, 1]
