// A notebook that is opened again has widgets whose models are gone: their HTML is shown instead.

import { CodeCell } from '@jupyterlab/cells';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { IOutputModel } from '@jupyterlab/rendermime';

const HTML = 'text/html';
/** Said of outputs of ours in their metadata. */
const OURS = 'tfd_notebook';
/** What JupyterLab writes in the place of a widget. */
const GONE = 'model not found';

/** Have the widgets of ours in notebooks fall back to what they looked like. */
export function fallBackToTwins(notebooks: INotebookTracker): void {
  notebooks.forEach(follow);
  notebooks.widgetAdded.connect((_, panel) => follow(panel));
}

function follow(panel: NotebookPanel): void {
  const observer = new MutationObserver(records => {
    for (const { addedNodes } of records) {
      for (const node of addedNodes) {
        // Texts only: live widgets change much more often than this.
        if (node.nodeType === Node.TEXT_NODE && node.nodeValue?.includes(GONE)) {
          replace(panel, node);
        }
      }
    }
  });
  observer.observe(panel.content.node, { subtree: true, childList: true });
  panel.disposed.connect(() => observer.disconnect());
}

function replace(panel: NotebookPanel, words: Node): void {
  const place = words.parentElement;
  const output = place && outputAt(panel, place);
  if (place && output?.metadata[OURS] !== undefined && output.data[HTML] !== undefined) {
    const twin = panel.content.rendermime.createRenderer(HTML);
    panel.disposed.connect(() => twin.dispose());
    void twin.renderModel(output).then(() => place.replaceChildren(twin.node));
  }
}

function outputAt(panel: NotebookPanel, node: Node): IOutputModel | undefined {
  for (const cell of panel.content.widgets) {
    if (cell instanceof CodeCell && cell.node.contains(node)) {
      const at = cell.outputArea.widgets.findIndex(widget => widget.node.contains(node));
      return at < 0 ? undefined : cell.outputArea.model.get(at);
    }
  }
  return undefined;
}
