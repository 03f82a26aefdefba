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

/** Put `code` into a new cell under the active one, which is active then. */
export function insertCode(panel: NotebookPanel, code: string): void {
  const notebook = panel.content;
  NotebookActions.insertBelow(notebook);
  notebook.activeCell?.model.sharedModel.setSource(code);
  void NotebookActions.focusActiveCell(notebook, { waitUntilReady: true });
}
