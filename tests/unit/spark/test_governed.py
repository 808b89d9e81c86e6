"""What Databricks says of tables and volumes that one may not read, or not at a version.

It cannot run here: these are its words as people posted them, or as its documentation has them, in the client's own
classes.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from pyspark.errors.exceptions.connect import SparkConnectGrpcException, convert_exception

from bridge.errors import AccessDeniedError, EngineError, SourceError
from bridge.spark.engines import Pin
from bridge.spark.engines.history import HistoryEngine
from bridge.spark.failures import Failure, classify, reason, translated
from bridge.spark.source import _read_delta

ANALYSIS = ["org.apache.spark.sql.catalyst.ExtendedAnalysisException", "org.apache.spark.sql.AnalysisException"]
UNAUTHORIZED = ["com.databricks.sql.managedcatalog.acl.UnauthorizedAccessException", "java.lang.Throwable"]
SECURITY = ["org.apache.spark.SparkSecurityException", "java.lang.RuntimeException"]


def recorded(message: str, *, classes: list[str], condition: str = "", sql_state: str = "") -> Exception:
    """Make the exception that the client makes of an answer with this in it."""
    told = {"classes": json.dumps(classes), "errorClass": condition, "sqlState": sql_state}
    info = ErrorInfo(reason=classes[0], metadata={key: value for key, value in told.items() if value})
    return convert_exception(info, message, None)


DENIED = [
    pytest.param(
        # https://github.com/mosaicml/llm-foundry/pull/1522
        recorded(
            "[INSUFFICIENT_PERMISSIONS] Insufficient privileges:\nUser does not have USE CATALOG on Catalog "
            "'finetuning'. SQLSTATE: 42501",
            classes=ANALYSIS, condition="INSUFFICIENT_PERMISSIONS", sql_state="42501",
        ),
        "t: USE CATALOG on catalog finetuning is not granted to you.\n"
        "  Ask its owner: GRANT USE CATALOG ON CATALOG finetuning TO `<you>`.",
        id="use catalog",
    ),
    pytest.param(
        # https://github.com/DataDog/documentation/pull/36005
        recorded(
            "[INSUFFICIENT_PERMISSIONS] Insufficient privileges:\nUser does not have USE SCHEMA on Schema "
            "'system.billing'. SQLSTATE: 42501",
            classes=ANALYSIS, condition="INSUFFICIENT_PERMISSIONS", sql_state="42501",
        ),
        "t: USE SCHEMA on schema system.billing is not granted to you.\n"
        "  Ask its owner: GRANT USE SCHEMA ON SCHEMA system.billing TO `<you>`; "
        "also needed: USE CATALOG ON CATALOG system.",
        id="use schema",
    ),
    pytest.param(
        # https://github.com/ibis-project/ibis/issues/9038, without a condition
        recorded(
            "PERMISSION_DENIED: User does not have USE SCHEMA on Schema 'comms_media_dev.default'.",
            classes=UNAUTHORIZED,
        ),
        "t: USE SCHEMA on schema comms_media_dev.default is not granted to you.\n"
        "  Ask its owner: GRANT USE SCHEMA ON SCHEMA comms_media_dev.default TO `<you>`; "
        "also needed: USE CATALOG ON CATALOG comms_media_dev.",
        id="use schema, from below Spark",
    ),
    pytest.param(
        # the SQL Statement Execution API, as transcribed in a public repository; the table renamed
        recorded(
            "[INSUFFICIENT_PERMISSIONS] Insufficient privileges:\nUser does not have SELECT on Table "
            "'main.ml.silver-purchases' SQLSTATE: 42501",
            classes=ANALYSIS, sql_state="42501",
        ),
        "t: SELECT on table main.ml.`silver-purchases` is not granted to you.\n"
        "  Ask its owner: GRANT SELECT ON TABLE main.ml.`silver-purchases` TO `<you>`; "
        "also needed: USE CATALOG ON CATALOG main, USE SCHEMA ON SCHEMA main.ml.",
        id="select",
    ),
    pytest.param(
        # a job's log in a public repository; the volume renamed
        recorded(
            "PERMISSION_DENIED: User does not have READ VOLUME on Volume 'main.landing.incoming'.", classes=UNAUTHORIZED
        ),
        "t: READ VOLUME on volume main.landing.incoming is not granted to you.\n"
        "  Ask its owner: GRANT READ VOLUME ON VOLUME main.landing.incoming TO `<you>`; "
        "also needed: USE CATALOG ON CATALOG main, USE SCHEMA ON SCHEMA main.landing.",
        id="read volume",
    ),
    pytest.param(
        # the same with WRITE; what else it needs: https://docs.databricks.com/volumes/privileges.html
        recorded(
            "PERMISSION_DENIED: User does not have WRITE VOLUME on Volume 'main.landing.incoming'.",
            classes=UNAUTHORIZED,
        ),
        "t: WRITE VOLUME on volume main.landing.incoming is not granted to you.\n"
        "  Ask its owner: GRANT WRITE VOLUME ON VOLUME main.landing.incoming TO `<you>`; "
        "also needed: READ VOLUME ON VOLUME main.landing.incoming, USE CATALOG ON CATALOG main, "
        "USE SCHEMA ON SCHEMA main.landing.",
        id="write volume",
    ),
    pytest.param(
        # https://github.com/darwin-eu/CDMConnector/issues/40: table access control of before Unity Catalog
        recorded(
            "[INSUFFICIENT_PERMISSIONS] Insufficient privileges:\n"
            "User does not have permission CREATE,USAGE on database `scratch`. SQLSTATE: 42501",
            classes=SECURITY, condition="INSUFFICIENT_PERMISSIONS", sql_state="42501",
        ),
        "t: CREATE,USAGE on database scratch is not granted to you.\n"
        "  Ask its owner: GRANT CREATE,USAGE ON DATABASE scratch TO `<you>`.",
        id="table access control",
    ),
    pytest.param(
        # https://github.com/databricks-solutions/databricks-apps-cookbook/issues/18, as it was cut there
        recorded(
            "[INSUFFICIENT_PERMISSIONS] Insufficient privileges:\nUser does not have USE CATALOG on Catalog",
            classes=ANALYSIS, condition="INSUFFICIENT_PERMISSIONS",
        ),
        "t: access is denied: [INSUFFICIENT_PERMISSIONS] Insufficient privileges: User does not have USE CATALOG on "
        "Catalog\n  Ask who owns it, or an administrator of the workspace.",
        id="no name",
    ),
    pytest.param(
        # another condition of that state: https://docs.databricks.com/error-messages/sqlstates.html
        recorded(
            "[LIST_FILES_AUTHORIZATION_ERROR.ON_PATH] Not authorized to call list_files. You do not have permissions.",
            classes=ANALYSIS, condition="LIST_FILES_AUTHORIZATION_ERROR.ON_PATH", sql_state="42501",
        ),
        "t: access is denied: [LIST_FILES_AUTHORIZATION_ERROR.ON_PATH] Not authorized to call list_files. You do not "
        "have permissions.\n  Ask who owns it, or an administrator of the workspace.",
        id="another condition",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("exc", "message"), DENIED)
def test_a_refusal_says_what_to_ask_for(exc: Exception, message: str) -> None:
    assert classify(exc) is Failure.DENIED

    with pytest.raises(AccessDeniedError) as caught, translated("t"):
        raise exc

    assert str(caught.value) == message
    assert isinstance(caught.value, EngineError)
    assert isinstance(caught.value, PermissionError)
    assert caught.value.__cause__ is exc


# https://docs.databricks.com/error-messages/fgac-time-travel-not-supported-error-class.html and
# .../row-level-security-column-mask-feature-not-supported-error-class.html
NO_TIME_TRAVEL = [
    recorded(
        "[FGAC_TIME_TRAVEL_NOT_SUPPORTED.PER_TABLE_RLS_CM] Cannot time travel to the specified version or timestamp of "
        "this table. SQLSTATE: 0A000",
        classes=ANALYSIS, condition="FGAC_TIME_TRAVEL_NOT_SUPPORTED.PER_TABLE_RLS_CM", sql_state="0A000",
    ),
    recorded(
        "[FGAC_TIME_TRAVEL_SCHEMA_MISMATCH.COLUMN_DROPPED] Cannot time travel to this table version. SQLSTATE: 42KD4",
        classes=ANALYSIS, condition="FGAC_TIME_TRAVEL_SCHEMA_MISMATCH.COLUMN_DROPPED", sql_state="42KD4",
    ),
    recorded(
        "[ROW_LEVEL_SECURITY_COLUMN_MASK_FEATURE_NOT_SUPPORTED.TIME_TRAVEL] Row level security policies and column "
        "mask policies for main.ml.t are not supported: SQLSTATE: 0A000",
        classes=ANALYSIS, condition="ROW_LEVEL_SECURITY_COLUMN_MASK_FEATURE_NOT_SUPPORTED.TIME_TRAVEL",
        sql_state="0A000",
    ),
    recorded(
        "[COLUMN_MASKS_FEATURE_NOT_SUPPORTED.TIME_TRAVEL] Column mask policies for main.ml.t are not supported: "
        "SQLSTATE: 0A000",
        classes=ANALYSIS, condition="COLUMN_MASKS_FEATURE_NOT_SUPPORTED.TIME_TRAVEL", sql_state="0A000",
    ),
]  # fmt: skip


class Governed:
    """A session in which a table may be read only as it is now."""

    def __init__(self, exc: Exception) -> None:
        self._exc = exc
        self.asked: list[str] = []

    def sql(self, text: str) -> Any:
        self.asked.append(text)
        if " AS OF " in text:
            raise self._exc
        return SimpleNamespace(schema="the schema")


@pytest.mark.parametrize("exc", NO_TIME_TRAVEL, ids=lambda exc: exc.getCondition())
def test_a_table_without_time_travel_is_read_as_it_is_where_nobody_asked_for_a_version(exc: Exception) -> None:
    spark: Any = Governed(exc)

    _, pin = _read_delta(spark, "main.ml.t", "main.ml.t", Pin(7, "7@now", "the newest"), None, None)

    assert spark.asked == ["SELECT * FROM main.ml.t VERSION AS OF 7", "SELECT * FROM main.ml.t"]
    assert (pin.version, pin.fingerprint) == (None, None)
    assert pin.reason == f"the table refuses time travel: {reason(exc)}"


@pytest.mark.parametrize("exc", NO_TIME_TRAVEL, ids=lambda exc: exc.getCondition())
@pytest.mark.parametrize(("version", "timestamp", "asked"), [(7, None, "version 7"), (None, "2026-01-01", "timestamp")])
def test_a_version_that_was_asked_for_is_not_replaced_by_the_newest(
    exc: Exception, version: int | None, timestamp: str | None, asked: str
) -> None:
    spark: Any = Governed(exc)

    with pytest.raises(SourceError, match=rf"^main\.ml\.t cannot be read as of {asked}.*: \["):
        _read_delta(spark, "main.ml.t", "main.ml.t", Pin(version, None, "asked for"), version, timestamp)


def test_another_error_of_the_newest_version_is_raised() -> None:
    spark: Any = Governed(SparkConnectGrpcException(message="boom"))

    with pytest.raises(EngineError, match=r"^main\.ml\.t: boom$"):
        _read_delta(spark, "main.ml.t", "main.ml.t", Pin(7, None, "the newest"), None, None)


def test_a_history_that_may_not_be_read_leaves_the_table_unpinned() -> None:
    exc = recorded(
        "[ROW_LEVEL_SECURITY_COLUMN_MASK_FEATURE_NOT_SUPPORTED.DESCRIBE_HISTORY] Row level security policies and "
        "column mask policies for main.ml.t are not supported:\nReading commit history is not supported.",
        classes=ANALYSIS, condition="ROW_LEVEL_SECURITY_COLUMN_MASK_FEATURE_NOT_SUPPORTED.DESCRIBE_HISTORY",
    )  # fmt: skip

    def refuse(text: str) -> Any:
        raise exc

    pin = HistoryEngine("databricks").pin(SimpleNamespace(sql=refuse), "main.ml.t", None, None, None)  # type: ignore[arg-type]

    assert pin.version is None
    assert pin.reason.startswith("the table's history cannot be read: [ROW_LEVEL_SECURITY_COLUMN_MASK")
    assert pin.reason.endswith("are not supported: Reading commit history is not supported.")
