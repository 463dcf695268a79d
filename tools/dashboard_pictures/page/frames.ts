/** Data frames from a Prometheus answer, as the Go part of Grafana's Prometheus data source builds them. */
import { type DataFrame, FieldType } from '@grafana/data';

const SPECIAL: Record<string, number> = { '+Inf': Infinity, '-Inf': -Infinity, NaN: NaN };
const number = (text: string) => SPECIAL[text] ?? Number(text);

/** Build one frame for each series. `transformV2` of @grafana/prometheus makes tables and heatmaps of them. */
export function framesOf(target: any, answer: any): DataFrame[] {
  const { resultType, result } = answer.data;
  return result.map(({ metric, values, value }: any) => {
    const points: Array<[number, string]> = values ?? [value];
    const legend = legendOf(target, metric);
    return {
      name: legend,
      refId: target.refId,
      meta: { type: 'timeseries-multi', custom: { resultType } } as any,
      length: points.length,
      fields: [
        {
          name: 'Time',
          type: FieldType.time,
          config: { interval: answer.step * 1000 },
          values: points.map(([seconds]) => Math.round(seconds * 1000)),
        },
        {
          name: 'Value',
          type: FieldType.number,
          labels: metric,
          config: { displayNameFromDS: legend },
          values: points.map(([, text]) => number(text)),
        },
      ],
    };
  });
}

function legendOf(target: any, metric: Record<string, string>): string {
  if (target.legendFormat) {
    return target.legendFormat.replace(/\{\{\s*(.+?)\s*\}\}/g, (_: string, label: string) => metric[label] ?? '');
  }
  const { __name__ = '', ...labels } = metric;
  const pairs = Object.entries(labels).map(([label, value]) => `${label}="${value}"`);
  return `${__name__}{${pairs.join(', ')}}`;
}
