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

/** Insert `code` into a new cell below the active one, activate it, and optionally run it. */
export function insertCode(panel: NotebookPanel, code: string, run = false): void {
  const notebook = panel.content;
  NotebookActions.insertBelow(notebook);
  notebook.activeCell?.model.sharedModel.setSource(code);
  if (run) {
    void NotebookActions.run(notebook, panel.sessionContext);
  }
  void NotebookActions.focusActiveCell(notebook, { waitUntilReady: true });
}
