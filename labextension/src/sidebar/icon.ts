import { LabIcon } from '@jupyterlab/ui-components';

// Shows a dispatcher and three workers.
const SVG = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16">
  <g class="jp-icon3" fill="#616161">
    <path d="M7.4 5h1.2v3h4.9v3h-1.2V9.2H8.6V11H7.4V9.2H3.7V11H2.5V8h4.9z"/>
    <rect x="5.6" y="1" width="4.8" height="4.4" rx="1"/>
    <rect x="1" y="10.6" width="4.2" height="4.2" rx="1"/>
    <rect x="5.9" y="10.6" width="4.2" height="4.2" rx="1"/>
    <rect x="10.8" y="10.6" width="4.2" height="4.2" rx="1"/>
  </g>
</svg>`;

export const clusterIcon = new LabIcon({ name: 'tfd-notebook:cluster', svgstr: SVG });
