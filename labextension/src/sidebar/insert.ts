// Insertion of code into the notebook of a kernel.

import { type INotebookTracker, NotebookActions, type NotebookPanel } from '@jupyterlab/notebook';

/** Return the notebook of a kernel, preferably the active one. */
export function notebookOf(
  tracker: INotebookTracker | null,
  kernel: string
): NotebookPanel | undefined {
  const uses = (panel: NotebookPanel | null) =>
    panel?.sessionContext.session?.kernel?.id === kernel;
  if (!tracker) {
    return undefined;
  }
  return uses(tracker.currentWidget) ? tracker.currentWidget! : tracker.find(uses);
}

/** Insert `code` into the active cell if it is empty, else into a new one below; optionally run it. */
export function insertCode(panel: NotebookPanel, code: string, run = false): void {
  const notebook = panel.content;
  const active = notebook.activeCell?.model;
  if (active?.type !== 'code' || active.sharedModel.getSource().trim()) {
    NotebookActions.insertBelow(notebook);
  }
  notebook.deselectAll(); // `run` runs all selected cells
  notebook.activeCell?.model.sharedModel.setSource(code);
  if (run) {
    void NotebookActions.run(notebook, panel.sessionContext);
  }
  void NotebookActions.focusActiveCell(notebook, { waitUntilReady: true });
}
