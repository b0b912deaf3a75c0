from __future__ import annotations

import shutil

from planted import plant


def test_fine_tuning_runs_no_code_of_the_model_and_the_folders_it_reads(
    fine_tune, encoder, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker, output = tmp_path / "code ran", tmp_path / "out"
    for source in (encoder, data):
        shutil.copytree(source, tmp_path / source.name)
        plant(tmp_path / source.name, marker)
    model, rows = (str(tmp_path / source.name) for source in (encoder, data))
    words = ["--model", model, "--data_dir", rows, "--epochs", "1", "--tasks", "rte"]
    # Again over its own planted folder, which still counts as what it was, and then over a model that is another.
    for codes, named in (((0,), False), ((0,), True), ((0, 2), True)):
        code, said = fine_tune(output, *words), capsys.readouterr().err
        assert code in codes, said
        assert code == 0 or said.count("error: ") == 1
        assert "Traceback" not in said
        assert not marker.exists()
        plant(output, marker, named=named)
