"""Recipes: the shipped ones are whole, a user's is read with its files beside it, faults name file and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_engines.recipe import find_recipe, shipped_recipes
from edge_runtime.errors import UsageError


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid_and_say_what_they_are_for(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe is not None
    assert recipe.about
    assert recipe.precision
    assert recipe.target


def test_a_recipe_is_read_from_a_file_and_finds_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    file = tmp_path / "mine.toml"
    file.write_text('source = "model.gguf"\ncalibration = "prompts.txt"\ngate = 1.02\n')
    recipe = find_recipe(str(file))
    assert recipe is not None
    assert recipe.source == str(tmp_path / "model.gguf")
    assert recipe.calibration == str(tmp_path / "prompts.txt")
    assert (recipe.gate, recipe.precision) == (1.02, None)


@pytest.mark.parametrize("argument", ["model.gguf", "hf:org/name", "smollm2-135m-instruct"])
def test_a_checkpoint_is_no_recipe(argument: str) -> None:
    assert find_recipe(argument) is None


def test_a_folder_of_the_same_name_is_meant_rather_than_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_recipe("smollm2-135m") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("source = ", "not a valid recipe"),
        ('source = "x"\nprecission = "int8"\n', "precission"),
        ('source = "x"\ngate = 3.0\n', r"\$.gate"),
        ('source = "x"\nprecision = "int3"\n', r"\$.precision"),
        ('name = "x"\n', "source"),
    ],
)
def test_a_broken_recipe_names_file_and_field(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=f"broken.toml.*{said}"):
        find_recipe(str(file))


def test_a_missing_recipe_names_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="smollm2-135m"):
        find_recipe(str(tmp_path / "nowhere.toml"))
