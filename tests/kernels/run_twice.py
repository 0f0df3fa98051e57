"""Run `compile.run` on a kernel that prints what is done with it: twice alike, then with other registers."""

from draftproof.kernels.compile import Step, run


class Kernel:
    """A stand-in for both a Triton kernel and its compiled form."""

    __name__ = "kernel"

    def warmup(self, *arguments: object, grid: tuple[int, ...], **options: object) -> "Kernel":
        print("asked")
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        assert len(grid) == 3
        return lambda *arguments: print("launched")


STEP = Step(Kernel(), (7,), (object(), 3), 4, ("kind",))

if __name__ == "__main__":
    for step in (STEP, STEP, STEP._replace(registers=64)):
        run(step, overlap=True)
