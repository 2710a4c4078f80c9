"""Measurements made by hand, for pages and comparisons."""

from recollect._bench.results import Cell, Figure, Measured, Reach

MIB = 2**20
CELL = Cell(model="Llama", size="small", mode="eager", device="GPU", torch="2.13", commit="abc")
PLAIN = Figure(contender="plain", family="torch", peak_bytes=11 * MIB, rounds_s=(1.0, 1.02, 0.98))
OURS = Figure(contender="recollect 50%", family="recollect", peak_bytes=6 * MIB, rounds_s=(1.1,))
BETTER = Figure(contender="torch SAC", family="torch", peak_bytes=7 * MIB, rounds_s=(1.05,))
WORSE = Figure(contender="torch full", family="torch", peak_bytes=6 * MIB, rounds_s=(1.3,))
SMALLER = Figure(contender="torch_remat", family="torch_remat", peak_bytes=3 * MIB, rounds_s=(1.5,))
FAILED = Figure(contender="save_on_cpu", family="offload", failed="out of memory")
MEASURED = Measured(
    cell=CELL,
    held_bytes=MIB,
    shape="width 64",
    figures=(PLAIN, OURS, BETTER, WORSE, SMALLER, FAILED),
)
REACHED = Measured(
    cell=Cell(model="Llama", size="small", mode="largest length", device="GPU", torch="2.13", commit="abc"),
    budget_bytes=40 * 2**30,
    reaches=(
        Reach(contender="recollect", family="recollect", value=65536, peak_bytes=39 * 2**30, step_s=2.0),
        Reach(contender="torch full", family="torch", value=32768, peak_bytes=38 * 2**30, step_s=1.0),
        Reach(contender="plain", family="torch"),
    ),
)
