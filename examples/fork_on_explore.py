"""Fork on explore: a data set is read once, and each approach works on its own copy of it.

The DataFrame is in the memory of the parent. A fork has it at once and pays only for what it
changes.
"""

from pvmm import Sandbox

ROWS = 20_000
LOAD = f"""
import numpy, pandas
generator = numpy.random.default_rng(7)
df = pandas.DataFrame({{"x": numpy.arange({ROWS}, dtype=float), "y": generator.normal(size={ROWS})}})
df.loc[::10, "x"] = float("nan")
print(len(df), int(df.x.isna().sum()))
"""

if __name__ == "__main__":
    with Sandbox(template="python-data", ttl_seconds=600) as parent:
        loaded = parent.run_code(LOAD)
        assert loaded.stdout.split() == [str(ROWS), str(ROWS // 10)], loaded

        lengths = {}
        for approach in ("fillna(0)", "dropna()", "interpolate()"):
            with parent.fork(ttl_seconds=120) as child:
                ran = child.run_code(f"df = df.{approach}\nlen(df)")
                assert ran.ok, ran.stderr
                lengths[approach] = int(ran.text or 0)
                table = child.run_code("df.describe()")
                assert table.html and "<table" in table.html, table

        # The children have changed `df`; the parent's is as it was.
        again = parent.run_code("print(len(df), int(df.x.isna().sum()))")
    print(lengths)
    assert lengths == {"fillna(0)": ROWS, "dropna()": ROWS * 9 // 10, "interpolate()": ROWS}
    assert again.stdout == loaded.stdout, again.stdout
