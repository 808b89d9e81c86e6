"""Apache Spark's own Connect server, from the pyspark package."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bridge.errors import ConfigError
from bridge.spark.engines.process import ConnectServer, free_port, serve, spark_environment

START_TIMEOUT_S = 120.0


def start_server(
    master: str,
    *,
    spark_jars: str | None,
    warehouse: Path | None = None,
    extra_conf: Mapping[str, str] | None = None,
) -> ConnectServer:
    """Start a Connect server on `master` and return when it answers, which takes 5 to 10 s.

    It listens on a free port of 127.0.0.1 and serves only who holds its token, which is in `remote`. It ends with
    this process. Names of managed tables do not survive it; their files do if `warehouse` is given.

    Args:
        master: As spark-submit takes it: "local[*]", "local-cluster[2,1,1024]", "spark://host:port".
        spark_jars: See `delta_conf`.
        warehouse: Where managed tables go; default: a temporary folder.
        extra_conf: Spark conf that wins over ours, save for address and port.

    Raises:
        EngineUnavailableError: No fitting Java, or the server was not ready within 120 s.
        MissingDependencyError: The full pyspark is not installed.
        ConfigError: `spark_jars` is wrong.
    """
    conf = delta_conf(spark_jars)
    environment = spark_environment()
    program = str(Path(environment["SPARK_HOME"]) / "bin" / "spark-submit")

    scratch = Path(tempfile.mkdtemp(prefix="bridge-spark-"))
    port = free_port()
    token = secrets.token_urlsafe(32)

    conf |= {
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
        # Results pass through the driver: collecting 488 MiB killed one of 1 GiB, Spark's default, and one of 2 GiB
        # had not finished after two minutes.
        "spark.driver.memory": "4g",
        # After an hour without a request it would forget a session, with its temporary views; it ends with us anyway.
        "spark.connect.session.manager.defaultSessionTimeout": "30d",
    }
    if master.startswith("local"):
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
        environment.pop("SPARK_LOCAL_HOSTNAME", None)
        # Executors elsewhere would not find a folder of this machine.
        conf["spark.sql.warehouse.dir"] = str(scratch / "warehouse")
    if warehouse is not None:
        conf["spark.sql.warehouse.dir"] = str(warehouse)
    conf |= extra_conf or {}
    conf |= {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port)}

    # By environment: every user of the machine can read a command line.
    environment["SPARK_CONNECT_AUTHENTICATE_TOKEN"] = token
    # A killed JVM leaves its temporary files, the work folders of a local-cluster among them.
    environment["SPARK_SUBMIT_OPTS"] = f'{environment.get("SPARK_SUBMIT_OPTS", "")} "-Djava.io.tmpdir={scratch}"'
    environment.setdefault("SPARK_LOCAL_DIRS", str(scratch))

    return serve(
        [
            *(program, "--master", master, "--name", "bridge"),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
            *(argument for key, value in conf.items() for argument in ("--conf", f"{key}={value}")),
            "spark-internal",
        ],
        name=f"Apache Spark's Connect server ({master})",
        environment=environment,
        port=port,
        # pyspark sends a token without TLS only to a host spelled "localhost".
        remote=f"sc://localhost:{port}/;token={token}",
        scratch=scratch,
        timeout_s=START_TIMEOUT_S,
    )


def delta_conf(spark_jars: str | None) -> dict[str, str]:
    """Return the conf that gives Spark Delta, or none of it without `spark_jars`.

    Args:
        spark_jars: A folder of jars, a comma-separated list of jars, or Maven coordinates, which Spark then downloads:
            "io.delta:delta-spark_4.2_2.13:4.4.0".
    """
    if not spark_jars:
        return {}
    if ":" in spark_jars and "/" not in spark_jars:
        key, jars = "spark.jars.packages", spark_jars.split(",")
    elif Path(spark_jars).is_dir():
        key, jars = "spark.jars", [str(jar) for jar in sorted(Path(spark_jars).absolute().glob("*.jar"))]
    else:
        key, jars = "spark.jars", spark_jars.split(",")
        for jar in jars:
            if "://" not in jar and not Path(jar).is_file():
                raise ConfigError(
                    f"spark_jars names {jar}, which is neither a folder nor a file. "
                    "Give a folder of jars, a comma-separated list of jars, or Maven coordinates."
                )
    if not any("delta-spark" in jar.rpartition("/")[2] for jar in jars):
        raise ConfigError(
            f"spark_jars holds no delta-spark jar: {spark_jars}. "
            "Add it and what it needs, or give io.delta:delta-spark_4.2_2.13:4.4.0."
        )
    return {
        key: ",".join(jars),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Delta's default of 50 tasks to read a log costs seconds on small tables.
        "spark.databricks.delta.snapshotPartitions": "2",
    }
