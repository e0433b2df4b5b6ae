"""The README's benchmark table is made from a file of results."""

import json

import readme_table

OURS = {
    "case": "29M",
    "num_ranks": 2,
    "name": "fullshard",
    "step_time_s": 0.3154,
    "ratio_to_fsdp2": {"value": 0.701, "low": 0.69, "high": 0.7149},
    "memory_peak_bytes": 300 * 2**20,
    "loaded": False,
}
PEER = OURS | {"name": "fsdp2", "memory_peak_bytes": 400 * 2**20}
FLOOR = OURS | {"name": "floor", "ratio_to_fsdp2": None, "memory_peak_bytes": None}
RESULTS = {
    "rows": [OURS, PEER, FLOOR],
    "machine": {"cores": 2, "vector_flags": ["avx2", "avx512f"]},
    "versions": {"torch": "2.13.0"},
    "command": "fullshard bench step",
}
README = "Before.\n\n<!-- results: r.json -->\nold\n<!-- end of results -->\n\nAfter.\n"


def _filled(folder, results):
    if results is not None:
        (folder / "r.json").write_text(json.dumps(results))
    return readme_table.filled(README, folder)


def test_a_row_shows_time_ratio_with_interval_and_memory(tmp_path):
    lines = _filled(tmp_path, RESULTS).splitlines()
    assert "| 29M, 2 ranks | 315 ms | 0.70 [0.69, 0.71] | 300 MiB | 0.75 |" in lines
    assert sum(line.startswith("| 29M") for line in lines) == 1


def test_what_stood_in_the_table_is_replaced_and_the_rest_is_kept(tmp_path):
    text = _filled(tmp_path, RESULTS)
    assert "old" not in text
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert readme_table.filled(text, tmp_path) == text


def test_command_machine_and_versions_stand_under_the_table(tmp_path):
    text = _filled(tmp_path, RESULTS)
    assert "`fullshard bench step`; machine: cores 2, vector flags avx2 avx512f" in text
    assert "versions: torch 2.13.0." in text


def test_figures_of_a_machine_that_others_used_are_marked(tmp_path):
    assert "loaded" not in _filled(tmp_path, RESULTS).lower()
    loaded = RESULTS | {"rows": [OURS | {"loaded": True}, PEER]}
    assert "| 315 ms (loaded) |" in _filled(tmp_path, loaded)


def test_missing_results_are_said_to_be_missing(tmp_path):
    assert readme_table.NO_RESULTS in _filled(tmp_path, None)
