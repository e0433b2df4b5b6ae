"""`fullshard plan --table` predicts runs of any framework, row by row."""

import csv

import pytest


def test_a_table_is_predicted_row_by_row_despite_bad_rows(tmp_path, plan):
    table, out = tmp_path / "rows.csv", tmp_path / "predictions.csv"
    table.write_text(
        "model_name,params_b,gpu_model,gpus,seq_len,peak_mem_gib\n"
        "Llama-3.1-8B,8.03,H100-SXM5-80GB,8,8192,\n"
        "Llama-3.1-8B,eight,H100-SXM5-80GB,8,8192,40\n"
        "short\n",
        encoding="utf-8",
    )
    found, code = plan("--table", table, "--out", out)
    assert code == 0
    assert found["rows"] == 3
    assert [one["row"] for one in found["not_predicted"]] == [2]
    lines = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
    assert lines[1]["peak_mem_gib"] == "40"
    assert "params_b: expected a positive number" in lines[1]["pred_note"]
    assert float(lines[0]["pred_tokens_per_sec_per_gpu_lo"]) > 0
    assert float(lines[2]["pred_step_time_s"]) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--table", "nowhere.csv"], "--table: 'nowhere.csv': expected a CSV file"),
        (["--table", "README.md"], "--table: expected a header"),
        (["--table", "README.md", "--nodes", "2"], "every row of the table has its own"),
        (["--table", "README.md", "--exact"], "every row of the table has its own"),
        (["--table", "README.md", "--optimizer-bytes", "0"], "every row of the table has its own"),
    ],
)
def test_a_file_that_is_no_table_is_refused(plan, words, said):
    found, code = plan(*words)
    assert code == 2
    assert said in found["error"]["message"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model_name,gpus\nllama,8\nllama, 7b,8\n", "more cells than columns in row 2"),
        ("model_name,gpus,gpus\nllama,8,4\n", "two columns with one name"),
        ('model_name,gpus\n"llama,8\nllama,4\n', "unexpected end of data"),
    ],
)
def test_a_table_with_cells_without_a_column_is_refused(tmp_path, plan, text, said):
    (tmp_path / "runs.csv").write_text(text)
    found, code = plan("--table", str(tmp_path / "runs.csv"))
    assert code == 2
    assert said in found["error"]["message"]
