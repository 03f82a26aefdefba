// A notebook that is opened again has widgets whose models are gone: their HTML is shown instead.

import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { IRenderMime, IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { Widget } from '@lumino/widgets';

const WIDGET = 'application/vnd.jupyter.widget-view+json';
const HTML = 'text/html';
/** Said of outputs of ours in their metadata. */
const OURS = 'tfd_notebook';
/** The rank that widgets are registered with. */
const RANK = -10;
const GONE = 'model not found';

/** Have the widgets of ours in notebooks fall back to what they look like without a kernel. */
export function fallBackToTwins(notebooks: INotebookTracker): void {
  const take = (panel: NotebookPanel) => {
    // Whoever shows widgets registers for each notebook when it is added, as we are called.
    queueMicrotask(() => wrap(panel.content.rendermime));
  };
  notebooks.forEach(take);
  notebooks.widgetAdded.connect((_, panel) => take(panel));
}

function wrap(rendermime: IRenderMimeRegistry): void {
  const original = rendermime.getFactory(WIDGET);
  if (original) {
    rendermime.addFactory(
      {
        ...original,
        mimeTypes: [WIDGET],
        createRenderer: options => new Twin(original.createRenderer(options), rendermime)
      },
      RANK
    );
  }
}

/** Shows a widget, or its HTML when the widget says that there is no model. */
class Twin extends Widget implements IRenderMime.IRenderer {
  private readonly _seen = new MutationObserver(() => this._look());
  private _model: IRenderMime.IMimeModel | null = null;

  constructor(
    private readonly _widget: IRenderMime.IRenderer,
    private readonly _rendermime: IRenderMimeRegistry
  ) {
    super();
    this.node.append(_widget.node);
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    if (model.metadata[OURS] !== undefined && model.data[HTML] !== undefined) {
      this._model = model;
      this._seen.observe(this._widget.node, { childList: true, characterData: true });
    }
    await this._widget.renderModel(model);
    this._look();
  }

  override dispose(): void {
    this._seen.disconnect();
    this._widget.dispose();
    super.dispose();
  }

  private _look(): void {
    const { node } = this._widget;
    const model = this._model;
    if (model && node.childElementCount === 0 && node.textContent.includes(GONE)) {
      this._model = null;
      this._seen.disconnect();
      const twin = this._rendermime.createRenderer(HTML);
      this.disposed.connect(() => twin.dispose());
      void twin.renderModel(model).then(() => {
        node.remove();
        this.node.append(twin.node);
      });
    }
  }
}
