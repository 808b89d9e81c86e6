"""The receipt in an MLflow run, where mlflow is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import bridge
from tests.exports import make_export


def test_the_receipt_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    receipt = {"table": "main.ml.t", "version": 3, "num_rows": 2, "schema_digest": "d", "spark_types": {"n": "bigint"}}
    make_export(tmp_path / "t", [pa.table({"n": [1, 2]})], receipt=receipt)
    table = bridge.open_export(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())

    with mlflow.start_run() as run:
        table.log_to_mlflow()

    params = mlflow.get_run(run.info.run_id).data.params
    assert params == {
        "main.ml.t.table": "main.ml.t", "main.ml.t.version": "3", "main.ml.t.num_rows": "2",
        "main.ml.t.schema_digest": "d",
    }  # fmt: skip
    (logged,) = (tmp_path / "runs").rglob("artifacts/bridge/*.json")
    assert json.loads(logged.read_text()) == table.receipt


def test_without_mlflow_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_export(tmp_path / "t", [pa.table({"n": [1]})])
    monkeypatch.setitem(sys.modules, "mlflow", None)

    with pytest.raises(bridge.MissingDependencyError, match="log_to_mlflow needs mlflow"):
        bridge.open_export(tmp_path).log_to_mlflow()
