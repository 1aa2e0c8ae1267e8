"""One line for each problem: where it was written, the key path, what was got, what was wanted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latepix.config.explain import known_keys, nearest, nearest_path
from latepix.config.loader import collect_versions, load_config, write_config
from latepix.config.schema import RunConfig, SftConfig
from latepix.errors import ConfigError

MINIMAL = """
output_dir = "runs/a"
steps = 7
[model]
path = "models/tiny"
"""


def write_toml(folder: Path, *, text: str = "", name: str = "run.toml", base: str = MINIMAL) -> str:
    path = folder / name
    path.write_text(base + text, encoding="utf-8")
    return str(path)


def refusal(*args: str) -> list[str]:
    """Return the lines of the error that these arguments end in."""
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, args)
    return str(caught.value).splitlines()


def test_a_file_and_the_command_line_make_a_config(tmp_path: Path) -> None:
    config = load_config(RunConfig, ["@", write_toml(tmp_path), "--trainer.optim.lr", "1e-4", "--seed=3"])
    assert (config.steps, config.model.path, config.trainer.optim.lr, config.seed) == (7, Path("models/tiny"), 1e-4, 3)


def test_the_command_line_wins_over_files_wherever_it_stands(tmp_path: Path) -> None:
    assert load_config(RunConfig, ["--steps", "9", "@", write_toml(tmp_path)]).steps == 9


def test_a_later_file_wins_over_an_earlier_one(tmp_path: Path) -> None:
    later = write_toml(tmp_path, name="later.toml", base="steps = 8")
    assert load_config(RunConfig, ["@", write_toml(tmp_path), "@", later]).steps == 8


def test_a_section_can_come_from_its_own_file(tmp_path: Path) -> None:
    part = write_toml(tmp_path, name="optim.toml", base="lr = 0.5")
    config = load_config(RunConfig, ["@", write_toml(tmp_path), "--trainer.optim", "@", part])
    assert config.trainer.optim.lr == 0.5


def test_a_file_may_follow_the_sign_without_a_space(tmp_path: Path) -> None:
    assert load_config(RunConfig, [f"@{write_toml(tmp_path)}"]).steps == 7


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--dry-run"], True),
        (["--dry_run"], True),
        (["--dry-run", "false"], False),
        (["--dry-run=true"], True),
        (["--no-dry-run"], False),
    ],
)
def test_a_switch_before_a_file_does_not_swallow_it(tmp_path: Path, flags: list[str], expected: bool) -> None:
    assert load_config(RunConfig, [*flags, "@", write_toml(tmp_path)]).dry_run is expected


def test_keys_may_be_written_with_hyphens_or_underscores(tmp_path: Path) -> None:
    args = ["@", write_toml(tmp_path), "--orchestrator.group-size", "4", "--orchestrator.max_in_flight", "5"]
    config = load_config(RunConfig, args)
    assert (config.orchestrator.group_size, config.orchestrator.max_in_flight) == (4, 5)


def test_an_unknown_key_in_a_file_names_file_path_value_and_nearest_key(tmp_path: Path) -> None:
    run = write_toml(tmp_path, text="[trainer.optim]\nlrr = 0.1")
    assert refusal("@", run) == [f"{run}: trainer.optim.lrr: unknown key, got 0.1; did you mean trainer.optim.lr?"]


def test_an_unknown_section_on_the_command_line_names_the_whole_key(tmp_path: Path) -> None:
    assert refusal("@", write_toml(tmp_path), "--trainer.optm.lr", "1") == [
        "command line: trainer.optm.lr: unknown key, got '1'; did you mean trainer.optim.lr?"
    ]


def test_a_key_in_the_wrong_section_is_found_in_the_right_one(tmp_path: Path) -> None:
    [line] = refusal("@", write_toml(tmp_path), "--lr", "1")
    assert line.endswith("did you mean trainer.optim.lr?")


def test_an_unknown_key_like_no_other_lists_the_known_ones(tmp_path: Path) -> None:
    run = write_toml(tmp_path, text="zzz = 1")
    assert refusal("@", run) == [f"{run}: model.zzz: unknown key, got 1; known keys of model: path, dtype"]


def test_an_unknown_section_with_several_keys_is_one_problem(tmp_path: Path) -> None:
    run = write_toml(tmp_path, text="[orchestator]\ngroup_size = 4\nseq_len = 8")
    assert refusal("@", run) == [
        f"{run}: orchestator: unknown key, got a section with group_size, seq_len; did you mean orchestrator?"
    ]


def test_a_value_out_of_range_says_the_range(tmp_path: Path) -> None:
    run = write_toml(tmp_path, text="[orchestrator]\ngroup_size = 1")
    assert refusal("@", run) == [f"{run}: orchestrator.group_size: got 1, wanted greater than or equal to 2"]


def test_a_value_is_blamed_on_the_command_line_when_it_overrides_a_file(tmp_path: Path) -> None:
    assert refusal("@", write_toml(tmp_path), "--steps", "0") == ["command line: steps: got '0', wanted greater than 0"]


def test_a_value_is_blamed_on_the_file_that_holds_it(tmp_path: Path) -> None:
    wrong = write_toml(tmp_path, name="wrong.toml", base="steps = -1")
    assert refusal("@", wrong, "@", write_toml(tmp_path, base='[model]\npath = "m"'), "--output-dir", "o") == [
        f"{wrong}: steps: got -1, wanted greater than 0"
    ]


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("inference.port", "x", "a whole number"),
        ("trainer.optim.lr", "fast", "a number"),
        ("images.fit", "perhaps", "true or false"),
        ("model.dtype", "float16", "'float32' or 'bfloat16'"),
        ("trainer.optim.betas", "0.9", "a list, which only a file can hold"),
    ],
)
def test_a_wrong_type_says_the_right_one(tmp_path: Path, flag: str, value: str, wanted: str) -> None:
    [line] = refusal("@", write_toml(tmp_path), f"--{flag}={value}")
    assert line == f"command line: {flag}: got {value!r}, wanted {wanted}"


def test_a_member_of_a_list_is_named_by_its_index(tmp_path: Path) -> None:
    run = write_toml(tmp_path, text="[trainer.optim]\nbetas = [0.9, 2]")
    assert refusal("@", run) == [f"{run}: trainer.optim.betas[1]: got 2, wanted less than 1"]


def test_a_section_written_as_a_value_is_refused(tmp_path: Path) -> None:
    run = write_toml(tmp_path, base='output_dir = "o"\ntrainer = 3\n[model]\npath = "m"')
    assert refusal("@", run) == [f"{run}: trainer: got 3, wanted a section of keys"]


def test_a_section_given_a_value_on_the_command_line_names_its_keys(tmp_path: Path) -> None:
    assert refusal("@", write_toml(tmp_path), "--model", "tiny") == [
        "command line: model: is a section, wanted one of its keys: --model.path, --model.dtype"
    ]


def test_a_missing_key_says_what_it_is_for(tmp_path: Path) -> None:
    run = write_toml(tmp_path, base='output_dir = "o"\n[model]')
    assert refusal("@", run) == [
        f"{run}: model.path: missing, wanted a path (Hugging Face model folder with tokenizer and image processor)"
    ]


def test_without_arguments_every_required_key_is_listed() -> None:
    assert [line.split(": missing")[0] for line in refusal()] == ["command line: output_dir", "command line: model"]


def test_a_rule_across_sections_names_both_places(tmp_path: Path) -> None:
    run = write_toml(tmp_path)
    [line] = refusal("@", run, "--trainer.optim.warmup-steps", "8")
    assert line == f"{run}, command line: trainer.optim.warmup_steps (8) must not exceed steps (7)"


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    run = write_toml(tmp_path, text="[sampling]\ntemperature = 0\nmax_token = 1")
    lines = refusal("@", run, "--seed", "-1")
    assert sorted(line.split(": ")[1] for line in lines) == ["sampling.max_token", "sampling.temperature", "seed"]


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    run = write_toml(tmp_path)
    wanted = str(tmp_path / "runs.toml")
    assert refusal("@", wanted) == [f"{wanted}: no such file; did you mean {run}?"]


def test_a_missing_file_without_a_neighbour_says_where_it_was_looked_for(tmp_path: Path) -> None:
    wanted = str(tmp_path / "absent" / "run.toml")
    assert refusal("@", wanted) == [f"{wanted}: no such file (looked in {tmp_path / 'absent'})"]


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    run = write_toml(tmp_path, base="steps = 1\nseed = = 2\n")
    [line] = refusal("@", run)
    assert line.startswith(f"{run}: is not valid TOML: ")
    assert "line 2" in line


def test_a_broken_json_file_names_the_line(tmp_path: Path) -> None:
    run = write_toml(tmp_path, name="run.json", base='{"steps": 1,\n')
    [line] = refusal("@", run)
    assert line.startswith(f"{run}: is not valid JSON: ")
    assert "line 2" in line


def test_a_json_file_must_hold_an_object(tmp_path: Path) -> None:
    run = write_toml(tmp_path, name="run.json", base="[1]")
    assert refusal("@", run) == [f"{run}: got a JSON list, wanted an object with the keys of a config"]


def test_a_file_of_another_type_is_refused(tmp_path: Path) -> None:
    run = write_toml(tmp_path, name="run.yaml", base="steps: 1")
    assert refusal("@", run) == [f"{run}: got a file of type '.yaml', wanted .toml or .json"]


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"a = '\xff'")
    assert refusal("@", str(path)) == [f"{path}: is not UTF-8 text (byte 5)"]


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").mkdir()
    [line] = refusal("@", str(tmp_path / "run.toml"))
    assert "cannot be read" in line


def test_the_file_sign_needs_a_file() -> None:
    assert refusal("@") == ["command line: @: no file follows, wanted a TOML or JSON file, as in `@ run.toml`"]


@pytest.mark.parametrize("args", [["--seed"], ["--seed", "--dry-run"]])
def test_a_key_needs_a_value(tmp_path: Path, args: list[str]) -> None:
    [line] = refusal("@", write_toml(tmp_path), *args)
    assert line.startswith("command line: seed: no value follows, wanted a whole number")


def test_a_word_that_belongs_to_no_key_is_refused(tmp_path: Path) -> None:
    assert refusal(write_toml(tmp_path, name="r.toml"))[0].endswith("wanted `@ FILE` or `--key value`")


def test_help_prints_the_keys_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(SftConfig, ["@", "absent.toml", "--help"], prog="latepix sft")
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert "usage: latepix sft" in printed
    assert "--trainer.optim.lr" in printed


def test_a_written_config_loads_as_an_equal_one(tmp_path: Path) -> None:
    args = ["@", write_toml(tmp_path, text="[trainer.optim]\nbetas = [0.5, 0.75]"), "--sampling.temperature", "0.1"]
    config = load_config(RunConfig, args)
    path = write_config(config, tmp_path / "new" / "run")
    assert path == tmp_path / "new" / "run" / "config.json"
    assert load_config(RunConfig, ["@", str(path)]) == config


def test_a_written_config_leaves_nothing_aside(tmp_path: Path) -> None:
    config = load_config(RunConfig, ["@", write_toml(tmp_path)])
    write_config(config, tmp_path / "run")
    write_config(config, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "versions.json"]


def test_versions_are_written_beside_the_config(tmp_path: Path) -> None:
    write_config(load_config(RunConfig, ["@", write_toml(tmp_path)]), tmp_path)
    versions = json.loads((tmp_path / "versions.json").read_text(encoding="utf-8"))
    assert versions == collect_versions()
    assert {"commit", "python", "latepix", "torch", "transformers", "renderers"} <= versions.keys()


def test_a_run_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    config = load_config(RunConfig, ["@", write_toml(tmp_path)])
    with pytest.raises(ConfigError, match=r"Cannot write the config to run folder .*run\.toml: File exists"):
        write_config(config, tmp_path / "run.toml")


@pytest.mark.parametrize(("name", "expected"), [("optm", "optim"), ("optim", "optim"), ("zzz", None)])
def test_nearest_finds_a_close_name_or_none(name: str, expected: str | None) -> None:
    assert nearest(name, {"optim", "loss"}) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("stepz", "steps"),
        ("trainr.optm.lr", "trainer.optim.lr"),
        ("optim.lr", "trainer.optim.lr"),
        ("trainer_optim_betaz", "trainer.optim.betas"),
        ("trainer.group_size", "orchestrator.group_size"),
        ("nothing.like.it", None),
    ],
)
def test_nearest_path_looks_in_the_same_section_first(path: str, expected: str | None) -> None:
    assert nearest_path(path, known_keys(RunConfig).paths) == expected
