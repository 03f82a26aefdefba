// Code into the notebook of a kernel.

import { type INotebookTracker, NotebookActions, type NotebookPanel } from '@jupyterlab/notebook';

/** The notebook that this kernel runs for, the one in front if there are several. */
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

/** Put `code` into a new cell under the active one, which is active then, and run it if asked. */
export function insertCode(panel: NotebookPanel, code: string, run = false): void {
  const notebook = panel.content;
  NotebookActions.insertBelow(notebook);
  notebook.activeCell?.model.sharedModel.setSource(code);
  if (run) {
    void NotebookActions.run(notebook, panel.sessionContext);
  }
  void NotebookActions.focusActiveCell(notebook, { waitUntilReady: true });
}
