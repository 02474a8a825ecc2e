// SPDX-License-Identifier: Apache-2.0
package rmq.interop;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.List;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.filter.FilterAPI;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.store.CommitLog;
import org.apache.rocketmq.store.DefaultMessageFilter;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.MessageArrivingListener;
import org.apache.rocketmq.store.MessageFilter;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** Where releases differ: 4.9.8. */
final class Release {
    private Release() {
    }

    static DefaultMessageStore newStore(MessageStoreConfig config) throws IOException {
        MessageArrivingListener deaf = (topic, queueId, offset, tagsCode, time, bitMap, properties) -> { };
        BrokerStatsManager stats = new BrokerStatsManager("interop", false);
        return new DefaultMessageStore(config, stats, deaf, new BrokerConfig());
    }

    static MessageExtBatch newBatch() {
        return new MessageExtBatch();
    }

    /** All checks of a recovery. */
    static DispatchRequest check(CommitLog log, ByteBuffer record) {
        return log.checkMessageAndReturnSize(record, true);
    }

    static MessageFilter tagFilter(String topic, String tags) {
        try {
            return tags == null ? null : new DefaultMessageFilter(FilterAPI.buildSubscriptionData(topic, tags));
        } catch (Exception error) {
            throw new IllegalArgumentException(tags, error);
        }
    }

    /** [nearest]: there is no choice of a boundary. */
    static List<Long> offsetsByTime(DefaultMessageStore store, String topic, int queueId, long time) {
        return List.of(store.getOffsetInQueueByTime(topic, queueId, time));
    }
}
