"""nbval for Jupytext percent files, stricter than nbval where it lets an error pass. Used by the root conftest.py."""

from collections import defaultdict

import jupytext
from nbval.plugin import IPyNbCell, IPyNbFile


class PercentFile(IPyNbFile):
    """A notebook whose cells are tests, run in one kernel; `exercise` cells are left out."""

    def setup(self):
        super().setup()
        get_message = self.kernel.get_message

        def remember_reply(stream, timeout=None):
            message = get_message(stream, timeout)
            if stream == "shell":
                self.reply = message["content"]
            return message

        self.kernel.get_message = remember_reply

    def collect(self):
        self.nb = jupytext.read(self.path, fmt="py:percent")
        code = (cell for cell in self.nb.cells if cell.cell_type == "code" and cell.source)
        for number, cell in enumerate(code, start=1):
            tags = cell.metadata.get("tags", [])
            options = defaultdict(bool, check_exception="raises-exception" in tags)
            if "exercise" not in tags:
                yield PercentCell.from_parent(self, name=f"Cell {number}", cell_num=number, cell=cell, options=options)


class PercentCell(IPyNbCell):
    def runtest(self):
        """Run the cell; also fail when it should have raised, or when IPython shows its error as plain text."""
        super().runtest()
        raised = any(output.output_type == "error" for output in self.test_outputs)
        if self.options["check_exception"] and not raised:
            self.raise_cell_error("The cell is tagged raises-exception and raised nothing")
        reply = self.parent.reply
        if reply["status"] == "error" and not raised:
            self.raise_cell_error(f"The cell ended with {reply['ename']}: {reply['evalue']}")
