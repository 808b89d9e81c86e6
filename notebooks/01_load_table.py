# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From a Spark table to arrays and tensors
#
# `bridge.load_table` reads a table through Spark Connect and brings it here, once. What it returns is a `Table`; its
# `to_...` methods make pandas, NumPy, torch or Hugging Face of it and never go back to Spark.
#
# This notebook needs no server and no Java: the embedded engine runs in this process and keeps its tables in a folder.
# On your own cluster or on Databricks only the next cell changes, or nothing at all where a session is active already.

# %%
import bridge

spark = bridge.connect("sail")  # or "sc://host:15002", "local[*]", "databricks"; without an argument it is found

# %% [markdown]
# ## A small table
#
# Any Spark table does. This one is made here, in Delta, with a few of the things that make real tables hard: nulls,
# strings, a decimal, an instant.

# %%
rows = spark.sql("""
    SELECT
        id,
        CASE WHEN id % 10 = 3 THEN NULL ELSE CAST(id % 7 AS INT) END AS visits,
        CAST(id / 100 AS FLOAT) AS score,
        CAST(id % 5 AS FLOAT) AS weight,
        CAST(id % 3 = 0 AS INT) AS bought,
        CONCAT('customer ', id) AS name,
        CAST(id * 1.25 AS DECIMAL(10, 2)) AS spent,
        TIMESTAMP '2024-01-01 00:00:00 UTC' + MAKE_INTERVAL(0, 0, 0, 0, CAST(id AS INT)) AS seen_at
    FROM range(1000)
""")
rows.write.format("delta").mode("overwrite").saveAsTable("main.default.customers")

# %% [markdown]
# ## Ask before you load
#
# `plan_table` takes the arguments of `load_table` and moves no rows. It says how large the result is and how that was
# learned, which version of the table would be read, and by which route.

# %%
bridge.plan_table("main.default.customers", where="id < 900")

# %% [markdown]
# ## Load
#
# `columns`, `where` and `limit` are applied by Spark. The version that was current when the plan was made is the one
# that is read, also if somebody writes to the table meanwhile.

# %%
table = bridge.load_table("main.default.customers")
table

# %% [markdown]
# `table.types` says what each column becomes, before you meet it in your data.

# %%
table.types

# %% [markdown]
# ## pandas
#
# Integers and booleans come in pandas's nullable types, so that a null does not turn a column of integers into floats.

# %%
frame = table.to_pandas()
frame.dtypes

# %%
frame.head()

# %% [markdown]
# ## NumPy
#
# If you come from `toPandas().to_numpy()`: that is one array of everything, of type `object` as soon as there is one
# string. Here you name the features and the label and get `(X, y)`.

# %%
X, y = table.to_numpy(features=["score", "weight"], label="bought")
X.shape, X.dtype, y.shape, y.dtype

# %% [markdown]
# Without `features`, each column comes as an array of its own, in a dict. For this table that is an error, and it is
# meant to be one: `visits` holds nulls, and an array of integers has no place for them.

# %%
try:
    table.to_numpy()
except bridge.LossyConversionError as error:
    print(error)

# %% [markdown]
# Two ways out: leave those rows where they are, or decide in Spark what a null stands for.

# %%
complete = bridge.load_table("main.default.customers", where="visits IS NOT NULL")
complete.num_rows, complete.to_numpy()["visits"][:5]

# %%
from pyspark.sql import functions as F

filled = bridge.load_table(spark.table("main.default.customers").withColumn("visits", F.coalesce("visits", F.lit(0))))
filled.num_rows, filled.to_numpy()["visits"][:5]

# %% [markdown]
# Features of different types need one type for the matrix, and you say which. With a floating type, nulls become NaN.

# %%
X, y = table.to_numpy(features=["visits", "score"], label="bought", dtype="float32")
X[:5]

# %% [markdown]
# ## Tensors
#
# The same, as torch tensors, and in batches.

# %%
X, y = complete.to_torch(features=["score", "weight"], label="bought")
X.shape, X.dtype, y.dtype

# %%
loader = complete.to_loader(batch_size=256, features=["score", "weight"], label="bought", shuffle=True, seed=1)
for features, label in loader:
    print(features.shape, label.shape)

# %% [markdown]
# ## Large tables: the other route
#
# A table that does not fit in `max_bytes` is not collected. It is written as Parquet shards, complete or absent, and
# read from there. `load_table` decides that by itself; here it is asked for. The embedded engine has a folder for
# exports; elsewhere you name a volume with `volume="/Volumes/..."`.

# %%
exported = bridge.load_table("main.default.customers", where="visits IS NOT NULL", route="export")
exported.plan

# %% [markdown]
# What you do with it is the same. The loader reads the shards row group by row group, whatever their size.

# %%
sum(len(label) for _, label in exported.to_loader(batch_size=256, features=["score", "weight"], label="bought"))

# %% [markdown]
# Asked for again, the export is found and Spark reads nothing. What runs without Spark opens it by its folder.

# %%
again = bridge.load_table("main.default.customers", where="visits IS NOT NULL", route="export")
again.plan.reuses == exported.path, bridge.open_export(exported.path).num_rows

# %% [markdown]
# ## The receipt
#
# What was read, by whom, when and with which versions: to be kept beside the model.

# %%
print(exported.receipt_json())
