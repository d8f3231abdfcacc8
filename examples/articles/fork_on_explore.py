"""From "AI agents": several approaches to one data set that is read once."""

from pvmm import Sandbox

CSV = "day,rain\n1,3.0\n2,\n3,5.0\n4,\n5,9.0\n"

parent = Sandbox(template="python-data")
parent.filesystem.write("/data.csv", CSV)  # the article's data set
parent.run("import pandas; df = pandas.read_csv('/data.csv'); print(df.head())")

branches = []
for approach in ["fillna", "dropna", "interpolate"]:
    child = parent.fork()
    child.run(f"df_{approach} = df.{approach}(); print(df_{approach}.describe())")
    branches.append(child)

# What this example promises: each branch has its own answer, and the parent has none of them.
# pandas wants a value for fillna, so that branch fails; it fails in a computer of its own.
fillna, dropna, interpolate = branches
assert "NameError" in fillna.run("df_fillna").stderr
assert dropna.run("print(len(df_dropna), df_dropna.rain.sum())").stdout == "3 17.0\n"
assert interpolate.run("print(df_interpolate.rain.sum())").stdout == "28.0\n"
assert "NameError" in parent.run("df_dropna").stderr

# Pick the best, throw away the rest
winner = branches[0]
for b in branches[1:]:
    b.close()

# The winner is still there, with the DataFrame that it has from its parent.
assert winner.run("print(len(df))").stdout == "5\n"
assert [s.id for s in Sandbox.list() if s.id in {b.id for b in branches}] == [winner.id]
winner.close()
parent.close()
